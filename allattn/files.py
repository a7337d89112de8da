"""The one way to replace a file: whoever reads it, at any time, finds the old content or all of the new."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # ends the name of what is being written; of a killed process it may be deleted


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Replace `path`: written under another name beside it, flushed to the disk, renamed.

    Args:
        path: its folder exists.
        content: text, which becomes UTF-8 with its line ends as they are; bytes; or a function that writes
            to the open file.

    Raises:
        OSError: `path` is named; the earlier file stays, and nothing else is left.
    """
    partial = _partial(path)
    try:
        with naming(path):
            with partial.open("wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _flush_folder(path.parent)


def copy_atomically(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`.

    Raises:
        OSError: `target` is named; the earlier file stays.
    """
    with source.open("rb") as whole:
        write_atomically(target, lambda file: shutil.copyfileobj(whole, file))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder for the block to fill; at its end the folder is `path`, after an error it is gone.

    Raises:
        OSError: it cannot be made or flushed, or `path` exists and holds something.
    """
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        _flush_folder(partial)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the block name `path`: a full disk is reported without one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")


def _flush_folder(folder: Path) -> None:
    """Let a renaming outlast a power failure, where the file system flushes folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
