"""Where text comes from, behind one interface: each split is an iterator of byte chunks.

A chunk is whole lines, valid UTF-8, each ended by b"\\n"; nothing else ends a line (b"\\r\\n" in a file is
read as b"\\n"). The sources are local files (`text_files`), WikiText on the Hugging Face hub (`hub`), and the
demo corpus (`demo`): the help topics of Python's own documentation, which ship with CPython, so that a first
run needs no download.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from allattn.data.config import DataConfig, Source
from allattn.data.demo import PydocSource
from allattn.data.hub import HubSource
from allattn.data.text_files import FilesSource, split_paths


class TextSource(Protocol):
    """A text in the splits train, valid and test."""

    def key(self, cache: Path) -> str:
        """Stands for the content; what a second start needs to know it at once is kept in `cache`.

        Raises:
            InputError: as `chunks`.
        """

    def size(self, split: str) -> int:
        """About how many bytes `chunks(split)` gives; for progress bars."""

    def chunks(self, split: str) -> Iterator[bytes]:
        """The lines of a split, some MiB at a time.

        Raises:
            InputError: the text is missing, empty or not UTF-8.
        """


def open_source(config: DataConfig) -> TextSource:
    """The source that `config` names; nothing is read yet."""
    if config.source is Source.files:
        return FilesSource(split_paths(config))
    if config.source is Source.pydoc:
        return PydocSource()
    return HubSource(config.source)
