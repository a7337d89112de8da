"""A text as 32-bit ids on disk: prepared once, checked, then opened as memory maps."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from allattn.data.config import DataConfig, Source, check_data
from allattn.data.fingerprint import Fingerprint, write_atomically
from allattn.data.sources import TextSource, open_source
from allattn.data.vocabulary import (
    Ids,
    count_words,
    encode_subwords,
    encode_words,
    load_tokenizer,
    save_tokenizer,
    split_words,
    tokenizer_hash,
    train_bpe,
    word_table,
    word_tokenizer,
)
from allattn.errors import InputError

log = logging.getLogger(__name__)

FORMAT = 1  # of the cached folder; raise it when the ids of an unchanged text would change
SPLITS = ("train", "valid", "test")
ID_TYPE = np.dtype("<i4")
# Words of each split, one <eos> a line included, and the vocabulary's size without a minimum count.
PUBLISHED = {
    Source.wikitext103: ((103_227_021, 217_646, 245_569), 267_735),
    Source.wikitext2: ((2_088_628, 217_646, 245_569), 33_278),
}


@dataclass(frozen=True)
class EncodedSplit:
    """One split."""

    ids: Ids  # (tokens,) int32, a read-only memory map
    tokens: int
    words: int  # word-level tokens, one <eos> a line included; normalizes a subword perplexity


@dataclass(frozen=True)
class Corpus:
    """An encoded text and what its ids mean."""

    tokenizer: Tokenizer
    tokenizer_hash: str  # SHA-256
    vocabulary_size: int
    fingerprint: str  # SHA-256 of the text of all splits
    splits: dict[str, EncodedSplit]  # train, valid, test


@dataclass(frozen=True)
class _Meta:
    """What meta.json records about a finished folder."""

    format: int
    fingerprint: str
    tokenizer_hash: str
    tokenizer_file: str  # SHA-256 of tokenizer.json
    tokens: dict[str, int]
    words: dict[str, int]


def prepare(config: DataConfig, progress: bool = True) -> Corpus:
    """Open the encoded text of `config`, encoding it first unless that has been done before.

    Several processes may call this at once: one encodes, the others wait. A folder under data.cache_folder is
    complete or absent; a damaged one is encoded again.

    Args:
        config: checked here.
        progress: show a bar on standard error while counting and encoding.

    Raises:
        InputError: settings contradict each other, the text is missing or not usable, its counts are not the
            published ones, or the cache folder cannot be written.
    """
    check_data(config)
    cache = Path(config.cache_folder).expanduser()
    source = open_source(config)
    given = (
        None if config.tokenizer in ("word", "bpe") else load_tokenizer(Path(config.tokenizer).expanduser())
    )
    try:
        key = source.key(cache)
        folder = cache / _folder_name(config, key, given)
        corpus = _open(folder)
        if corpus is not None:
            return corpus
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            corpus = _open(folder)  # another process may have been faster
            if corpus is not None:
                return corpus
            _discard(folder)
            _build(config, source, key, given, folder, progress)
            corpus = _open(folder)
    except OSError as error:
        raise InputError(
            f"data.cache_folder={config.cache_folder}: {error.strerror or error}; free space there or name "
            "another folder that can be written"
        ) from error
    assert corpus is not None
    return corpus


def _folder_name(config: DataConfig, key: str, given: Tokenizer | None) -> str:
    tokenizer = config.tokenizer if given is None else tokenizer_hash(given)
    identity = [FORMAT, key, tokenizer, config.vocabulary_size, config.minimum_count]
    return f"{config.source.value}-{sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def _open(folder: Path) -> Corpus | None:
    """The corpus in `folder`, or None where there is none that is whole."""
    try:
        meta = _Meta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
        text = (folder / "tokenizer.json").read_bytes()
        sizes = {split: (folder / f"{split}.bin").stat().st_size for split in SPLITS}
        whole = all(sizes[split] == meta.tokens[split] * ID_TYPE.itemsize for split in SPLITS)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not whole or meta.format != FORMAT or sha256(text).hexdigest() != meta.tokenizer_file:
        return None
    tokenizer = Tokenizer.from_str(text.decode())
    maps = {split: np.memmap(folder / f"{split}.bin", ID_TYPE, "r") for split in SPLITS}
    splits = {split: EncodedSplit(maps[split], meta.tokens[split], meta.words[split]) for split in SPLITS}
    return Corpus(tokenizer, meta.tokenizer_hash, tokenizer.get_vocab_size(), meta.fingerprint, splits)


def _discard(folder: Path) -> None:
    if folder.exists():
        log.warning("%s: damaged or from another version; encoding the text again", folder)
        shutil.rmtree(folder)


def _build(
    config: DataConfig, source: TextSource, key: str, given: Tokenizer | None, folder: Path, progress: bool
) -> None:
    """Encode all splits into `folder`, which appears at once and whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        tokenizer = given or _make_tokenizer(config, source, progress)
        encode = _encoder(config, tokenizer)
        fingerprint = Fingerprint()
        tokens, words = {}, {}
        for split in SPLITS:
            fingerprint.start_split(split)
            chunks = _watched(source, split, f"encoding {split}", progress)
            tokens[split], words[split] = _encode_split(chunks, encode, fingerprint, partial / f"{split}.bin")
        _check_published(config, words, tokenizer.get_vocab_size())
        if source.key(folder.parent) != key:
            raise InputError(
                f"data.source={config.source.value}: the text changed while it was read; start again"
            )
        save_tokenizer(tokenizer, partial / "tokenizer.json")
        meta = _Meta(
            format=FORMAT,
            fingerprint=fingerprint.hexdigest(),
            tokenizer_hash=tokenizer_hash(tokenizer),
            tokenizer_file=sha256((partial / "tokenizer.json").read_bytes()).hexdigest(),
            tokens=tokens,
            words=words,
        )
        write_atomically(partial / "meta.json", json.dumps(asdict(meta), indent=1))
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_tokenizer(config: DataConfig, source: TextSource, progress: bool) -> Tokenizer:
    chunks = _watched(
        source, "train", "counting words" if config.tokenizer == "word" else "learning BPE", progress
    )
    if config.tokenizer == "word":
        return word_tokenizer(count_words(chunks), config.minimum_count)
    assert config.vocabulary_size is not None
    return train_bpe(chunks, config.vocabulary_size)


def _encoder(config: DataConfig, tokenizer: Tokenizer) -> Callable[[bytes], tuple[Ids, int]]:
    """A function from a chunk to its ids and its number of words."""
    if config.tokenizer != "word":
        return lambda chunk: (encode_subwords(chunk, tokenizer), sum(1 for _ in split_words(chunk)))
    table = word_table(tokenizer)

    def encode(chunk: bytes) -> tuple[Ids, int]:
        ids = encode_words(chunk, table)
        return ids, len(ids)

    return encode


def _encode_split(
    chunks: Iterable[bytes], encode: Callable[[bytes], tuple[Ids, int]], fingerprint: Fingerprint, path: Path
) -> tuple[int, int]:
    """Append the chunks' ids to `path`; returns the numbers of tokens and words."""
    tokens = words = 0
    with path.open("wb") as file:
        for chunk in chunks:
            fingerprint.update(chunk)
            ids, chunk_words = encode(chunk)
            file.write(ids.astype(ID_TYPE, copy=False).data)
            tokens += len(ids)
            words += chunk_words
        file.flush()
        os.fsync(file.fileno())
    return tokens, words


def _check_published(config: DataConfig, words: dict[str, int], vocabulary_size: int) -> None:
    if config.source not in PUBLISHED:
        return
    published_words, published_vocabulary = PUBLISHED[config.source]
    found, expected = list(words.values()), list(published_words)
    if config.tokenizer == "word" and config.minimum_count == 1:
        found, expected = [*found, vocabulary_size], [*expected, published_vocabulary]
    if found != expected:
        raise InputError(
            f"data.source={config.source.value}: words of train, valid, test (and vocabulary) are "
            f"{found}, published are {expected}; delete its copy in the Hugging Face cache and start again"
        )


def _watched(source: TextSource, split: str, what: str, show: bool) -> Iterator[bytes]:
    """The split's chunks, with a bar of the bytes handled."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(what, total=source.size(split))
        for chunk in source.chunks(split):
            yield chunk
            bar.advance(task, len(chunk))
