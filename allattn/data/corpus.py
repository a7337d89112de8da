"""From text to ids on disk: encoded once, checked, then opened as memory maps."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from allattn.data.articles import at_titles
from allattn.data.config import RAW_SOURCES, DataConfig, Source, check_data
from allattn.data.encoded import (
    FORMAT,
    ID_TYPE,
    POSITION_TYPE,
    SPLITS,
    Corpus,
    Counts,
    find_folder,
    finish_folder,
    ids_file,
    open_folder,
    positions_file,
)
from allattn.data.fingerprint import Fingerprint
from allattn.data.sources import TextSource, open_source
from allattn.data.vocabulary import (
    Encoded,
    Ids,
    count_words,
    encode_subwords,
    encode_text,
    encode_words,
    is_word_level,
    load_tokenizer,
    number_of_words,
    tokenizer_hash,
    train_bpe,
    unknown_id,
    word_table,
    word_tokenizer,
)
from allattn.errors import InputError
from allattn.files import PARTIAL, new_folder, take_lock, user_path

log = logging.getLogger(__name__)

# Words of each split, one <eos> a line included, and the vocabulary's size without a minimum count.
PUBLISHED = {
    Source.wikitext103: ((103_227_021, 217_646, 245_569), 267_735),
    Source.wikitext2: ((2_088_628, 217_646, 245_569), 33_278),
}


def prepare(config: DataConfig, progress: bool = True, own: Tokenizer | None = None) -> Corpus:
    """Open the encoded text of `config`, encoding it first unless that has been done before.

    Several processes may call this at once: one encodes, the others wait. A folder under data.cache_folder is
    complete or absent; a damaged one is encoded again. To open one that is complete takes no right to write
    there: it may be another user's.

    Args:
        config: checked here.
        progress: show a bar on standard error while counting and encoding.
        own: the tokenizer of a pretrained model, in the place of data.tokenizer; it reads text with its line
            breaks and knows no `<eos>` of ours (see `encode_text`).

    Raises:
        InputError: settings contradict each other, the text is missing or not usable, its counts are not the
            published ones, or the cache folder is none, cannot be written or cannot be locked.
    """
    check_data(config, vocabulary_given=own is not None)
    cache = user_path("data.cache_folder", config.cache_folder)
    source = open_source(config)
    given = own or _given_tokenizer(config)
    try:
        key = _key(source, cache, own)
        folder = _folder(cache, config, key, given)
        corpus = open_folder(folder)
        if corpus is not None:
            return corpus
        cache.mkdir(parents=True, exist_ok=True)
        lock = take_lock(cache / f"{folder.name}.lock", "data.cache_folder")
        try:
            corpus = open_folder(folder)  # another process may have been faster
            if corpus is None:
                _discard(folder)
                _build(config, source, key, own, given, folder, progress)
                corpus = open_folder(folder)
        finally:
            lock.release()
    except OSError as error:
        raise InputError(
            f"data.cache_folder={config.cache_folder}: {error.strerror or error}; free space there or name "
            "another folder that can be written"
        ) from error
    assert corpus is not None
    return corpus


def _given_tokenizer(config: DataConfig) -> Tokenizer | None:
    if config.tokenizer in ("word", "bpe"):
        return None
    path = user_path("data.tokenizer", config.tokenizer)
    if not path.is_file():
        raise InputError(
            f"data.tokenizer={path}: there is no such file; give word, bpe, or the path of a tokenizer.json"
        )
    tokenizer = load_tokenizer(path)
    if config.source in RAW_SOURCES and is_word_level(tokenizer):
        raise InputError(
            f"data.tokenizer={config.tokenizer} is word level, but data.source={config.source.value} has no "
            f"<unk>: use data.source={config.source.value.removesuffix('_raw')}"
        )
    return tokenizer


def _folder(cache: Path, config: DataConfig, key: str, given: Tokenizer | None) -> Path:
    """The folder of this text and tokenizer; a tokenizer.json made here finds the text it was made from."""
    tokenizer = config.tokenizer
    if given is not None:
        tokenizer = tokenizer_hash(given)
        if found := find_folder(cache, key, tokenizer):
            return found
    identity = [FORMAT, key, tokenizer, config.vocabulary_size, config.minimum_count]
    return cache / f"{config.source.value}-{sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def _discard(folder: Path) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.*{PARTIAL}"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        log.warning("%s: damaged or from another version; encoding the text again", folder)
        shutil.rmtree(folder)


def _build(
    config: DataConfig,
    source: TextSource,
    key: str,
    own: Tokenizer | None,
    given: Tokenizer | None,
    folder: Path,
    progress: bool,
) -> None:
    """Encode all splits into `folder`, which appears at once and whole."""
    with new_folder(folder) as partial:
        tokenizer = given or _make_tokenizer(config, source, progress)
        encode = _encoder(tokenizer, encode_subwords if own is None else encode_text)
        fingerprint = Fingerprint()
        counts = {}
        for split in SPLITS:
            fingerprint.start_split(split)
            chunks = _watched(source, split, f"encoding {split}", progress)
            counts[split] = _encode_split(chunks, encode, fingerprint, partial, split)
        _check_published(config, counts, tokenizer.get_vocab_size())
        if _key(source, folder.parent, own) != key:
            raise InputError(
                f"data.source={config.source.value}: the text changed while it was read; start again"
            )
        finish_folder(partial, key, fingerprint.hexdigest(), tokenizer, counts)


def _make_tokenizer(config: DataConfig, source: TextSource, progress: bool) -> Tokenizer:
    chunks = _watched(
        source, "train", "counting words" if config.tokenizer == "word" else "learning BPE", progress
    )
    if config.tokenizer == "word":
        return word_tokenizer(count_words(chunks), config.minimum_count)
    assert config.vocabulary_size is not None
    return train_bpe(chunks, config.vocabulary_size)


def _key(source: TextSource, cache: Path, own: Tokenizer | None) -> str:
    """What identifies the text and how its line breaks are read."""
    return source.key(cache) + ("" if own is None else " with its line breaks")


def _encoder(
    tokenizer: Tokenizer, encode: Callable[[bytes, Tokenizer], Ids]
) -> Callable[[bytes], tuple[Encoded, int]]:
    """A function from whole lines to their ids and their number of words; `encode` is for subwords."""
    if is_word_level(tokenizer):
        table = word_table(tokenizer)

        def by_words(lines: bytes) -> tuple[Encoded, int]:
            encoded = encode_words(lines, table)
            return encoded, len(encoded.ids)

        return by_words
    unknown = unknown_id(tokenizer)

    def by_subwords(lines: bytes) -> tuple[Encoded, int]:
        ids = encode(lines, tokenizer)
        unseen = np.flatnonzero(ids == unknown) if unknown is not None else np.empty(0, np.int64)
        return Encoded(ids, unseen), number_of_words(lines)

    return by_subwords


def _encode_split(
    chunks: Iterable[bytes],
    encode: Callable[[bytes], tuple[Encoded, int]],
    fingerprint: Fingerprint,
    folder: Path,
    split: str,
) -> Counts:
    """Write the ids of the chunks, and where unseen words and articles are; how many there are of each."""
    tokens = words = 0
    unseen, articles = [], []
    with ids_file(folder, split).open("wb") as file:
        for chunk in chunks:
            fingerprint.update(chunk)
            for lines, begins_article in at_titles(chunk):
                encoded, words_here = encode(lines)
                file.write(encoded.ids.astype(ID_TYPE, copy=False).data)
                unseen.append(tokens + encoded.unseen)
                if begins_article:
                    articles.append(tokens)
                tokens += len(encoded.ids)
                words += words_here
    by_kind = {"unseen": np.concatenate(unseen), "articles": np.array(articles)}
    for kind, positions in by_kind.items():
        positions_file(folder, split, kind).write_bytes(positions.astype(POSITION_TYPE).tobytes())
    return Counts(tokens, words, **{kind: len(positions) for kind, positions in by_kind.items()})


def _check_published(config: DataConfig, counts: dict[str, Counts], vocabulary_size: int) -> None:
    if config.source not in PUBLISHED:
        return
    published_words, published_vocabulary = PUBLISHED[config.source]
    found, expected = [of_split.words for of_split in counts.values()], list(published_words)
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
