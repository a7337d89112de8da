"""One SHA-256 for the text of all splits."""

import hashlib
from collections.abc import Iterable


class Fingerprint:
    """SHA-256 over splits of any chunking: call `start_split`, then `update` for each of its chunks."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def start_split(self, split: str) -> None:
        self._hash.update(b"\0" + split.encode() + b"\0")  # texts hold no NUL, so splits cannot run together

    def update(self, chunk: bytes) -> None:
        self._hash.update(chunk)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def fingerprint(splits: Iterable[tuple[str, Iterable[bytes]]]) -> str:
    """SHA-256 (hexadecimal) of (split name, chunks) pairs."""
    result = Fingerprint()
    for split, chunks in splits:
        result.start_split(split)
        for chunk in chunks:
            result.update(chunk)
    return result.hexdigest()
