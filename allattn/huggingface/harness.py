"""lm-evaluation-harness on our models. Its own command line with our classes registered:

python -m allattn.huggingface.harness --model hf --model_args pretrained=FOLDER --tasks ...
"""

from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from allattn.data.vocabulary import load_tokenizer
from allattn.heads.scores import SequenceScoring
from allattn.heads.watched import Visitor
from allattn.huggingface import AllAttentionConfig, AllAttentionForCausalLM, AllAttentionTokenizer
from allattn.huggingface.opening import Foreign
from allattn.model.language_model import AllAttentionLM
from allattn.training.exports import special_tokens


def as_causal_lm(model: AllAttentionLM, tokenizer_hash: str) -> AllAttentionForCausalLM:
    """The model itself, not a copy, as transformers has it."""
    config = AllAttentionConfig(model=model.config.to_dict(), tokenizer_hash=tokenizer_hash)
    with torch.device("meta"):
        wrapped = AllAttentionForCausalLM(config)
    wrapped.model = model
    return wrapped.eval()


def as_harness_model(
    model: AllAttentionLM, tokenizer: Path, tokenizer_hash: str, batch_size: int, max_length: int
) -> LM:
    """The model as lm-evaluation-harness takes it.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: its tokenizer.json.
        tokenizer_hash: of that file.
        batch_size: texts at once.
        max_length: tokens of a window; a longer text is cut, and each window's memory begins empty.
    """
    tokens: dict[str, Any] = special_tokens(load_tokenizer(tokenizer))
    return HFLM(
        pretrained=as_causal_lm(model, tokenizer_hash),
        tokenizer=AllAttentionTokenizer(str(tokenizer), **tokens),
        backend="causal",
        batch_size=batch_size,
        max_length=max_length,
    )


def as_foreign_harness_model(opened: Foreign, batch_size: int, max_length: int) -> LM:
    """A model of others as lm-evaluation-harness takes it; at most as many tokens as it has positions."""
    positions = getattr(opened.model.config, "max_position_embeddings", None) or max_length
    return HFLM(
        pretrained=opened.model.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=min(max_length, positions),
    )


def foreign_batch_size(mask: Visitor, batch_size: int) -> int:
    """Texts at once under a mask: one where it goes by scores of each text.

    The harness pads the shorter texts of a batch and does not say where, and padding must not be scored.
    """
    return 1 if isinstance(mask, SequenceScoring) else batch_size


if __name__ == "__main__":
    cli_evaluate()
