"""Settings of the text and its tokenizer."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from allattn.errors import InputError, refuse_wrong_kinds


class Source(Enum):
    """Where the text comes from."""

    wikitext103 = "wikitext103"  # word level, rare words already <unk>; from the hub
    wikitext2 = "wikitext2"
    wikitext103_raw = "wikitext103_raw"  # untouched text without <unk>, for subword tokenizers; from the hub
    wikitext2_raw = "wikitext2_raw"
    files = "files"  # three local text files
    checkpoint = "checkpoint"  # what the checkpoint was trained on; the stage fills it in
    pydoc = "pydoc"  # demo corpus that ships with Python


class Split(Enum):
    """Which text of the corpus."""

    train = "train"
    valid = "valid"
    test = "test"


RAW_SOURCES = (Source.wikitext103_raw, Source.wikitext2_raw)
FILE_SETTINGS = ("train_file", "valid_file", "test_file")
SMALLEST_BPE = 257  # 256 bytes and <eos>


@dataclass
class DataConfig:
    """Which text, cut into which tokens."""

    source: Source = Source.pydoc
    folder: str | None = None  # source=files: holds wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens
    train_file: str | None = None  # source=files: instead of folder, all three files by name
    valid_file: str | None = None
    test_file: str | None = None
    tokenizer: str = "word"  # "word", "bpe" (byte level, trained here), or the path of a tokenizer.json
    vocabulary_size: int | None = None  # tokenizer=bpe: entries, <eos> included
    minimum_count: int = 1  # tokenizer=word: training words seen less often become <unk>
    cache_folder: str = "~/.cache/allattn"  # encoded text; safe to delete


def data_config_from_dict(values: dict[str, Any]) -> DataConfig:
    """The settings of a text from plain values, as a checkpoint records them.

    Raises:
        InputError: a key or the source is unknown, or a value is of the wrong kind.
    """
    unknown = sorted(map(str, set(values) - set(DataConfig.__dataclass_fields__)))
    if unknown:
        raise InputError(f"the record of its text has unknown entries: {', '.join(unknown)}")
    try:
        source = Source(values.get("source"))
    except ValueError:
        raise InputError("the record of its text names no known data.source") from None
    config = DataConfig(**{**values, "source": source})
    refuse_wrong_kinds("data", config)
    return config


def check_data(config: DataConfig, vocabulary_given: bool = False) -> None:
    """Refuse contradictory settings.

    Args:
        config: of a text.
        vocabulary_given: a model brings its own, whatever data.tokenizer is by default.

    Raises:
        InputError: names the settings that do not fit.
    """
    _check_files(config)
    _check_tokenizer(config, vocabulary_given)


def _check_files(config: DataConfig) -> None:
    named = [name for name in FILE_SETTINGS if getattr(config, name) is not None]
    if config.source is not Source.files:
        for name in ("folder", *named):
            if getattr(config, name) is not None:
                raise InputError(
                    f"data.{name}={getattr(config, name)} has no effect with "
                    f"data.source={config.source.value}: set data.source=files or leave it out"
                )
    elif config.folder is not None and named:
        raise InputError(f"data.folder and data.{named[0]} are both set: give the folder or the three files")
    elif config.folder is None and len(named) < len(FILE_SETTINGS):
        raise InputError(
            "data.source=files needs data.folder (with wiki.train.tokens, wiki.valid.tokens, "
            "wiki.test.tokens), or all of data.train_file, data.valid_file, data.test_file"
        )


def _check_tokenizer(config: DataConfig, vocabulary_given: bool) -> None:
    if not config.tokenizer:
        raise InputError("data.tokenizer is empty: give word, bpe, or the path of a tokenizer.json")
    if config.tokenizer == "word" and config.source in RAW_SOURCES and not vocabulary_given:
        word_level = config.source.value.removesuffix("_raw")
        raise InputError(
            f"data.tokenizer=word does not fit data.source={config.source.value}, which has no <unk>: "
            f"use data.source={word_level} or a subword tokenizer"
        )
    if config.tokenizer == "bpe":
        if config.vocabulary_size is None or config.vocabulary_size < SMALLEST_BPE:
            given = (
                ""
                if config.vocabulary_size is None
                else f", not data.vocabulary_size={config.vocabulary_size}"
            )
            raise InputError(
                f"data.tokenizer=bpe needs data.vocabulary_size, a number of at least {SMALLEST_BPE} (256 "
                f"bytes and <eos>){given}"
            )
    elif config.vocabulary_size is not None:
        raise InputError(
            f"data.vocabulary_size={config.vocabulary_size} has no effect with "
            f"data.tokenizer={config.tokenizer}: only bpe takes it"
        )
    if config.minimum_count < 1:
        raise InputError(f"data.minimum_count={config.minimum_count}: must be at least 1")
    if config.minimum_count > 1 and config.tokenizer != "word":
        raise InputError(
            f"data.minimum_count={config.minimum_count} (perhaps the experiment's) has no effect with "
            f"data.tokenizer={config.tokenizer}: give data.minimum_count=1"
        )
