"""Our vocabularies as tokenizers of transformers: the same text, the same ids.

Our own readers cut a text into lines, and `<eos>` ends each. Here `<eos>` takes the place of every line break
before the text is cut into tokens: the same ids at word level and for byte-level BPE. Another tokenizer.json
may treat what follows `<eos>` by rules of its own.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from allattn.data.vocabulary import EOS, is_word_level, load_tokenizer
from allattn.errors import InputError
from allattn.training.exports import CONFIG_FILE, MODEL_TYPE, check_export_config
from allattn.training.loading import TOKENIZER_FILE, checked_tokenizer

LINE_END = AddedToken(EOS, special=True, normalized=True)  # found also where the normalizer has put it


class AllAttentionTokenizer(PreTrainedTokenizerFast):
    """A tokenizer.json of an export. `<eos>` ends a line, begins a text and fills rows.

    Args:
        tokenizer_file: the tokenizer.json.
        kwargs: of transformers.

    Raises:
        InputError: the file is missing or is no tokenizer with `<eos>`, or the export whose folder it lies in
            is of another vocabulary or a newer format.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012  (transformers' own declaration)

    def __init__(self, tokenizer_file: str | None = None, **kwargs: Any) -> None:
        path = Path(tokenizer_file or TOKENIZER_FILE)
        self.ours = load_tokenizer(path)
        _check_export(path.with_name(CONFIG_FILE))
        if is_word_level(self.ours):
            kwargs["split_special_tokens"] = True  # a word that merely contains <eos> is a word
        super().__init__(tokenizer_object=_with_line_ends(self.ours), **kwargs)
        self.backend_tokenizer.add_special_tokens([LINE_END])  # transformers has put the file's in its place

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The arguments as they are: the file is read by the constructor."""
        return kwargs

    def _save_pretrained(
        self,
        save_directory: Any,
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """Write our tokenizer.json, whose hash the model's config.json holds."""
        if len(self) != self.ours.get_vocab_size():
            raise InputError(
                "tokens were added that the model has no vectors for: the tokenizer is not saved"
            )
        path = Path(save_directory) / TOKENIZER_FILE
        path.write_text(self.ours.to_str(), encoding="utf-8")
        return (*file_names, str(path))


def _check_export(config: Path) -> None:
    """Refuse a tokenizer.json that does not belong to the config.json of an export beside it."""
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None
    if not isinstance(values, dict) or values.get("model_type") != MODEL_TYPE:
        return
    check_export_config(values, config)
    if values["tokenizer_hash"]:
        checked_tokenizer(config, {"allattn": values})


def _with_line_ends(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads a line break as `<eos>`."""
    word_level = is_word_level(tokenizer)
    copy: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens([LINE_END])
    line_ends = normalizers.Replace("\n", f" {EOS} " if word_level else EOS)
    own = tokenizer.normalizer
    copy.normalizer = line_ends if own is None else normalizers.Sequence([line_ends, own])
    return copy
