"""An encoded text as it lies on disk: one folder with the ids of each split, the tokenizer and meta.json."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from allattn.data.vocabulary import Ids, save_tokenizer, tokenizer_hash
from allattn.files import PARTIAL, write_atomically

FORMAT = 1  # raise it when the folder's content for an unchanged text changes
SPLITS = ("train", "valid", "test")
ID_TYPE = np.dtype("<i4")


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
class Meta:
    """What meta.json records."""

    format: int
    key: str  # of the text
    fingerprint: str
    tokenizer_hash: str
    tokenizer_file: str  # SHA-256 of tokenizer.json
    tokens: dict[str, int]
    words: dict[str, int]


def ids_file(folder: Path, split: str) -> Path:
    """Where a split's ids are: 32-bit little-endian integers and nothing else."""
    return folder / f"{split}.bin"


def finish_folder(
    folder: Path,
    key: str,
    fingerprint: str,
    tokenizer: Tokenizer,
    tokens: dict[str, int],
    words: dict[str, int],
) -> None:
    """Add the tokenizer and meta.json to a folder that has the ids of all splits."""
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    file_hash = sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    meta = Meta(FORMAT, key, fingerprint, tokenizer_hash(tokenizer), file_hash, tokens, words)
    write_atomically(folder / "meta.json", json.dumps(asdict(meta), indent=1))


def open_folder(folder: Path) -> Corpus | None:
    """The corpus in `folder`, or None where there is none that is whole and of this version."""
    meta = _read_meta(folder)
    if meta is None:
        return None
    try:
        text = (folder / "tokenizer.json").read_bytes()
        sizes = {split: ids_file(folder, split).stat().st_size for split in SPLITS}
    except OSError:
        return None
    if sha256(text).hexdigest() != meta.tokenizer_file:
        return None
    if sizes != {split: meta.tokens[split] * ID_TYPE.itemsize for split in SPLITS}:
        return None
    tokenizer = Tokenizer.from_str(text.decode())
    maps = {split: np.memmap(ids_file(folder, split), ID_TYPE, "r") for split in SPLITS}
    splits = {split: EncodedSplit(maps[split], meta.tokens[split], meta.words[split]) for split in SPLITS}
    return Corpus(tokenizer, meta.tokenizer_hash, tokenizer.get_vocab_size(), meta.fingerprint, splits)


def find_folder(cache: Path, key: str, tokenizer: str) -> Path | None:
    """The folder that holds the text `key` encoded by the tokenizer of the given hash."""
    for folder in sorted(path.parent for path in cache.glob("*/meta.json")):
        meta = _read_meta(folder)
        if folder.suffix != PARTIAL and meta and (meta.key, meta.tokenizer_hash) == (key, tokenizer):
            return folder
    return None


def _read_meta(folder: Path) -> Meta | None:
    try:
        meta = Meta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return meta if meta.format == FORMAT else None
