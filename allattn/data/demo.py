"""The demo corpus: the help topics of Python's documentation, as shipped with CPython in `pydoc_data.topics`.

About 80 topics and half a million characters of technical English (Python Software Foundation License). It
differs a little from one Python version to the next, so results on it are for trying things out, not for
comparing.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from allattn.data.fingerprint import fingerprint
from allattn.errors import InputError

SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}  # of the characters, in whole topics
SHUFFLE_SEED = 0
WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or a run of one punctuation character


class PydocSource:
    """The help topics, whole topics per split, words and punctuation separated by single spaces."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] | None = None

    def key(self, cache: Path) -> str:
        """SHA-256 of the content."""
        return fingerprint((split, self.chunks(split)) for split in SHARES)

    def size(self, split: str) -> int:
        """Bytes of the split."""
        return len(self._text(split))

    def chunks(self, split: str) -> Iterator[bytes]:
        """The whole split in one chunk.

        Raises:
            InputError: this Python ships without the topics.
        """
        yield self._text(split)

    def _text(self, split: str) -> bytes:
        if self._texts is None:
            self._texts = split_topics(_topics())
        return self._texts[split]


def split_topics(topics: dict[str, str]) -> dict[str, bytes]:
    """Deal whole topics out to the splits by `SHARES`; depends on the topics alone, not on their order."""
    names = sorted(topics)
    random.Random(SHUFFLE_SEED).shuffle(names)
    lengths = dict.fromkeys(SHARES, 0)
    texts: dict[str, list[str]] = {split: [] for split in SHARES}
    for name in names:
        split = min(SHARES, key=lambda split: lengths[split] / SHARES[split])  # the one most behind
        lengths[split] += len(topics[name])
        texts[split] += [spaced(line) for line in topics[name].strip("\n").split("\n")] + [""]
    return {split: "".join(f"{line}\n" for line in lines).encode() for split, lines in texts.items()}


def spaced(line: str) -> str:
    """The line's words and punctuation, separated by single spaces."""
    return " ".join(match.group() for match in WORD.finditer(line))


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "data.source=pydoc: this Python ships without pydoc_data.topics; "
            "use data.source=files data.folder=FOLDER or another data.source"
        ) from error
    return dict(topics)
