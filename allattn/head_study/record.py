"""What a study has measured, a line each, so that a killed one goes on where it was."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import Timeout

from allattn.errors import InputError
from allattn.files import naming, take_lock

RECORD = "points.jsonl"
LOCK = ".lock"


class Record:
    """Measurements by what they are of; those of other models, texts and settings stay beside them.

    Args:
        path: of the JSON lines; a line that a kill cut off is dropped.
        setting: what all measurements of this study share.

    Raises:
        InputError: the file holds something else.
    """

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        self._path = path
        self._study = identity(setting)
        self._found: dict[str, dict[str, Any]] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("rb+") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._found[entry["key"]] = entry["measured"]
            except (ValueError, TypeError, KeyError):
                raise InputError(
                    f"{path}: line {number} is none of a study; move the file away, or give another folder="
                ) from None

    def get(self, what: Mapping[str, Any]) -> dict[str, Any] | None:
        """The measurement of `what` in this study; None where it has not been made."""
        return self._found.get(self._key(what))

    def add(self, what: Mapping[str, Any], measured: dict[str, Any]) -> None:
        """Keep a measurement, on the disk before this returns.

        Raises:
            InputError: the file cannot be written.
        """
        key = self._key(what)
        line = json.dumps({"key": key, "study": self._study, **what, "measured": measured}) + "\n"
        try:
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from None
        self._found[key] = measured

    def _key(self, what: Mapping[str, Any]) -> str:
        return identity({"study": self._study, "what": dict(what)})


def identity(values: Mapping[str, Any]) -> str:
    """A short hash of plain values, whatever their order."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Inside, no other process writes a study to `folder`, which is made where it is missing.

    Raises:
        InputError: another one does, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / LOCK, "folder", timeout=0)
    except Timeout:
        raise InputError(
            f"folder={folder}: another study writes there now; wait for it, or give another folder="
        ) from None
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be written ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()
