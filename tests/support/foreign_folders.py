"""Folders with tiny models of transformers and a tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .foreign_models import WORDS


def word_tokens(starts: bool = False) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are 2, 3, ...; 0 is unknown or padding; 1, <s>, may stand before a text."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{index}": index + 2 for index in range(WORDS - 2)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if starts:
        from tokenizers.processors import TemplateProcessing

        own.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=own, **tokens)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The folder of a model with the tokenizer of `word_tokens`."""
    return saved_with(model, word_tokens(), folder)


def saved_with(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """The folder of a model with a tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
