"""Local text files as byte chunks of whole lines, checked to be UTF-8."""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from allattn.data.config import FILE_SETTINGS, DataConfig
from allattn.data.fingerprint import fingerprint
from allattn.errors import InputError
from allattn.files import file_version, user_path, write_atomically

CHUNK_BYTES = 16 * 2**20


class FilesSource:
    """Three text files.

    Args:
        paths: by split.
    """

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths

    def key(self, cache: Path) -> str:
        """SHA-256 of the content; remembered by places and `file_version`s in `cache`, if possible."""
        for path in self.paths.values():
            _check_exists(path)
        versions = [[str(path.resolve()), *file_version(path)] for path in self.paths.values()]
        remembered = cache / "fingerprints" / sha256(json.dumps(versions).encode()).hexdigest()
        with suppress(OSError):
            content = remembered.read_bytes().decode(errors="replace")
            if re.fullmatch("[0-9a-f]{64}", content):  # whole
                return content
        content = fingerprint((split, self.chunks(split)) for split in self.paths)
        with suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(remembered, content)
        return content

    def size(self, split: str) -> int:
        """Bytes of the file."""
        return self.paths[split].stat().st_size

    def chunks(self, split: str) -> Iterator[bytes]:
        """See `read_lines`."""
        return read_lines(self.paths[split])


def split_paths(config: DataConfig) -> dict[str, Path]:
    """The file of each split, from data.folder or from the three data.*_file.

    Raises:
        InputError: the folder does not exist, or a ~ stands for none.
    """
    if config.folder is not None:
        folder = user_path("data.folder", config.folder)
        if not folder.is_dir():
            raise InputError(f"data.folder={config.folder}: there is no such folder")
        return {split: folder / f"wiki.{split}.tokens" for split in ("train", "valid", "test")}
    return {
        name.removesuffix("_file"): user_path(f"data.{name}", getattr(config, name)) for name in FILE_SETTINGS
    }


def read_lines(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Read a UTF-8 file in chunks of whole lines, each line ended by b"\\n".

    A leading byte-order mark is dropped, b"\\r\\n" becomes b"\\n", and the last line gets its b"\\n" where it
    has none. Memory: a few times `chunk_bytes`, or the longest line where that is longer.

    Args:
        path: the file.
        chunk_bytes: how much is read at once.

    Raises:
        InputError: the file is missing, unreadable, empty, not UTF-8, or holds a NUL byte.
    """
    _check_exists(path)
    offset, line = 0, 1  # of the next chunk's first byte
    empty = True
    try:
        for raw in _whole_lines(path, chunk_bytes):
            if offset == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError(f"{path}: is UTF-16 (by its first two bytes); save it as UTF-8")
            _check_text(raw, path, offset, line)
            text = raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw
            offset += len(raw)
            line += raw.count(b"\n")
            text = text.replace(b"\r\n", b"\n")
            if text:
                empty = False
                yield text if text.endswith(b"\n") else text + b"\n"
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); check the file and its rights"
        ) from error
    if empty:
        raise InputError(f"{path}: is empty; every split needs at least one line of text")


def _whole_lines(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    """The file's bytes unchanged, cut after line ends only."""
    with path.open("rb") as file:
        unfinished: list[bytes] = []  # pieces of a line whose end has not come yet
        while block := file.read(chunk_bytes):
            end = block.rfind(b"\n") + 1
            if end:
                yield b"".join([*unfinished, block[:end]])
                unfinished = []
            if end < len(block):
                unfinished.append(block[end:])
        if unfinished:
            yield b"".join(unfinished)


def _check_text(raw: bytes, path: Path, offset: int, line: int) -> None:
    problem = None
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem, place = f"byte 0x{raw[error.start]:02x} is not valid UTF-8", error.start
    nul = raw.find(b"\0")
    if nul >= 0 and (problem is None or nul < place):
        problem, place = "a NUL byte, as in UTF-16 or a binary file", nul
    if problem is not None:
        line += raw.count(b"\n", 0, place)
        raise InputError(
            f"{path}, line {line}, byte offset {offset + place}: {problem}; save the file as UTF-8"
        )


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise InputError(
            f"{path}: there is no such file; data.source=files needs data.folder with wiki.train.tokens, "
            "wiki.valid.tokens and wiki.test.tokens, or data.train_file, data.valid_file and data.test_file"
        )
