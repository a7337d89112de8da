"""An encoded text as it lies on disk: one folder with the ids of each split, the tokenizer and meta.json.

All files are hashed when they are written, and again when they are opened for the first time after any change
of theirs (see `file_version`); the file `checked` remembers that, where the folder can be written.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from allattn.data.vocabulary import Ids, Positions, save_tokenizer, tokenizer_hash
from allattn.files import PARTIAL, file_hash, file_version, write_atomically

FORMAT = 3  # raise it when the folder's content for an unchanged text changes
SPLITS = ("train", "valid", "test")
ID_TYPE = np.dtype("<i4")
POSITION_TYPE = np.dtype("<i8")
_KINDS = ("unseen", "articles")  # of positions
_CHECKED = "checked"


@dataclass(frozen=True)
class EncodedSplit:
    """One split."""

    ids: Ids  # (tokens,) int32, a read-only memory map
    tokens: int
    words: int  # word-level tokens, one <eos> a line included; normalizes a subword perplexity
    unseen: Positions  # (u,) int64: tokens whose word the vocabulary lacks; the text's own <unk> is in it
    articles: Positions  # (a,) int64: first tokens of the articles; none where the text has no titles


@dataclass(frozen=True)
class Corpus:
    """An encoded text and what its ids mean."""

    tokenizer: Tokenizer
    tokenizer_hash: str  # SHA-256
    vocabulary_size: int
    fingerprint: str  # SHA-256 of the text of all splits
    splits: dict[str, EncodedSplit]  # train, valid, test


@dataclass(frozen=True)
class Counts:
    """How many a split has of what its files hold, and its words."""

    tokens: int
    words: int
    unseen: int
    articles: int


@dataclass(frozen=True)
class Meta:
    """What meta.json records."""

    format: int
    key: str  # of the text
    fingerprint: str
    tokenizer_hash: str
    splits: dict[str, Counts]
    files: dict[str, str]  # SHA-256 of all others, by name


def ids_file(folder: Path, split: str) -> Path:
    """Where a split's ids are: 32-bit little-endian integers and nothing else."""
    return folder / f"{split}.bin"


def positions_file(folder: Path, split: str, kind: str) -> Path:
    """Where a split's positions of one kind (unseen, articles) are: 64-bit little-endian integers."""
    return folder / f"{split}.{kind}.bin"


def finish_folder(
    folder: Path,
    key: str,
    fingerprint: str,
    tokenizer: Tokenizer,
    counts: dict[str, Counts],
) -> None:
    """Add the tokenizer and meta.json to a folder that has the ids and positions of all splits."""
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    hashes = {file.name: file_hash(file) for file in sorted(folder.iterdir())}
    meta = Meta(FORMAT, key, fingerprint, tokenizer_hash(tokenizer), counts, hashes)
    write_atomically(folder / "meta.json", json.dumps(asdict(meta), indent=1))


def open_folder(folder: Path) -> Corpus | None:
    """The corpus in `folder`, or None where there is none that is whole and of this version."""
    meta = _read_meta(folder)
    try:
        if meta is None or not _is_whole(folder, meta):
            return None
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        splits = {split: _open_split(folder, split, meta.splits[split]) for split in SPLITS}
    except OSError:
        return None
    return Corpus(tokenizer, meta.tokenizer_hash, tokenizer.get_vocab_size(), meta.fingerprint, splits)


def _open_split(folder: Path, split: str, counts: Counts) -> EncodedSplit:
    ids = np.memmap(ids_file(folder, split), ID_TYPE, "r")
    unseen, articles = (np.fromfile(positions_file(folder, split, kind), POSITION_TYPE) for kind in _KINDS)
    return EncodedSplit(ids, counts.tokens, counts.words, unseen, articles)


def _is_whole(folder: Path, meta: Meta) -> bool:
    """Whether all files are as they were written; hashed unless these versions of them have been before."""
    versions = json.dumps({name: file_version(folder / name) for name in meta.files}).encode()
    with suppress(OSError):
        if (folder / _CHECKED).read_bytes() == versions:
            return True
    if any(file_hash(folder / name) != written for name, written in meta.files.items()):
        return False
    with suppress(OSError):  # the folder may be another user's
        write_atomically(folder / _CHECKED, versions)
    return True


def find_folder(cache: Path, key: str, tokenizer: str) -> Path | None:
    """The folder that holds the text `key` encoded by the tokenizer of the given hash."""
    for folder in sorted(path.parent for path in cache.glob("*/meta.json")):
        meta = _read_meta(folder)
        if folder.suffix != PARTIAL and meta and (meta.key, meta.tokenizer_hash) == (key, tokenizer):
            return folder
    return None


def _read_meta(folder: Path) -> Meta | None:
    try:
        values = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            return None
        values["splits"] = {split: Counts(**values["splits"][split]) for split in SPLITS}
        return Meta(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
