"""Files: places, locks, hashes, and the one way to replace a file.

Whoever reads a file that is being replaced, at any time, finds the old content or all of the new.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from allattn.errors import InputError

PARTIAL = ".partial"  # ends the name of what is being written; of a killed process it may be deleted
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


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


def user_path(setting: str, value: str) -> Path:
    """The path that a setting gives, its ~ expanded.

    Raises:
        InputError: there is no home folder.
    """
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise InputError(
            f"{setting}={value}: ~ stands for no folder here (HOME is not set and the system knows no home "
            f"of this user); give {setting} a path without ~"
        ) from None


def take_lock(path: Path, setting: str, timeout: float = -1) -> FileLock:
    """Take the lock of a file, which is made where it is missing; `release` gives it back.

    Args:
        path: the lock's file.
        setting: names the folder, for the error's advice.
        timeout: how long to wait for another process, in seconds; -1 is without end.

    Raises:
        Timeout: another process holds it.
        InputError: the file system has no locks.
        OSError: the file cannot be made.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        raise InputError(
            f"{path.parent}: its file system has no locks, and nothing else keeps two processes from writing "
            f"there at once; set {setting} to a folder of another file system, such as a local disk"
        ) from None
    return lock


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_version(path: Path) -> list[int]:
    """Size, time of the content's last change and of any last change (nanoseconds).

    The last one is the system's own and cannot be set back: an edit that keeps the size and restores the time
    is another version. Two versions look alike only where all of it, edits and readings, happens within one
    tick of the file system's clock.

    Raises:
        OSError: there is no such file.
    """
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


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
