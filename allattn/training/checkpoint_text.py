"""The text that belongs to a checkpoint."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from allattn.data.config import FILE_SETTINGS, DataConfig, Source, check_data, data_config_from_dict
from allattn.data.corpus import Corpus, prepare
from allattn.data.vocabulary import load_tokenizer
from allattn.errors import InputError
from allattn.families import sizes_from_dict
from allattn.files import user_path

_OWN = "own"  # data.tokenizer in the record of a text that the model's own tokenizer has read


def corpus_of(
    wanted: DataConfig, checkpoint: dict[str, Any], tokenizer: Path | Tokenizer, progress: bool = True
) -> tuple[DataConfig, Corpus]:
    """The text to use with a checkpoint: its own unless another is named, always with its vocabulary.

    Args:
        wanted: which text.
        checkpoint: of a model.
        tokenizer: its file; the tokenizer itself of a model that comes without.
        progress: show what takes long.

    Raises:
        InputError: the settings contradict each other, or the checkpoint's own text is not what it was.
    """
    check_data(wanted, vocabulary_given=True)
    if wanted.tokenizer != "word" or wanted.minimum_count != 1:
        raise InputError(
            "data.tokenizer and data.minimum_count do nothing here: the checkpoint has its vocabulary"
        )
    if isinstance(tokenizer, Path) and not sizes_from_dict(checkpoint["allattn"]["model"]).eos_ends_lines:
        tokenizer = load_tokenizer(tokenizer, needs_eos=False)
    own = tokenizer if isinstance(tokenizer, Tokenizer) else None
    data = _data_of(wanted, checkpoint, _OWN if own else str(tokenizer))
    corpus = prepare(data, progress, own)
    if wanted.source is Source.checkpoint and corpus.fingerprint != checkpoint["allattn"]["fingerprint"]:
        raise InputError(
            "the text that the checkpoint was trained on has changed since, so numbers would not compare: "
            "bring it back, or name another one by data.source=files data.folder=FOLDER"
        )
    return data, corpus


def text_record(data: DataConfig, corpus: Corpus) -> dict[str, Any]:
    """What every checkpoint says about its text."""
    saved = asdict(data) | {"source": data.source.value}
    for name in ("folder", *FILE_SETTINGS):
        if saved[name] is not None:
            saved[name] = str(user_path(f"data.{name}", saved[name]).resolve())
    return {
        "data": saved,
        "tokenizer_hash": corpus.tokenizer_hash,
        "fingerprint": corpus.fingerprint,
    }


def _data_of(wanted: DataConfig, checkpoint: dict[str, Any], tokenizer: str) -> DataConfig:
    if wanted.source is Source.checkpoint:
        if "data" not in checkpoint["allattn"]:
            raise InputError(
                "the model names no text that it was trained on: name one by data=files "
                "data.folder=FOLDER, or data=wikitext103_raw"
            )
        saved = data_config_from_dict(checkpoint["allattn"]["data"])
        _refuse_moved(saved)
        wanted = replace(saved, cache_folder=wanted.cache_folder)
    return replace(wanted, tokenizer=tokenizer, vocabulary_size=None, minimum_count=1)


def _refuse_moved(saved: DataConfig) -> None:
    places = [saved.folder, *(getattr(saved, name) for name in FILE_SETTINGS)]
    for place in places if saved.source is Source.files else ():
        if place is not None and not Path(place).exists():
            raise InputError(
                f"{place}: the text that the checkpoint was trained on is no longer there; say where it is "
                "by data.source=files data.folder=FOLDER, or by data.source=files and the three data.*_file"
            )
