"""WikiText from the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allattn.data.config import Source
from allattn.errors import InputError

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # a commit, so that the text cannot change under a name
CONFIGURATIONS = {
    Source.wikitext103: "wikitext-103-v1",
    Source.wikitext2: "wikitext-2-v1",
    Source.wikitext103_raw: "wikitext-103-raw-v1",
    Source.wikitext2_raw: "wikitext-2-raw-v1",
}
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
ROWS_PER_CHUNK = 20_000


class HubSource:
    """One configuration of the WikiText repository; a row is a line.

    Args:
        source: one of the hub's sources.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._splits: dict[str, Any] | None = None  # datasets.Dataset by hub split

    def key(self, cache: Path) -> str:
        """Name and revision: asks neither the network nor the `datasets` package."""
        return f"{REPOSITORY}/{CONFIGURATIONS[self.source]}@{REVISION}"

    def size(self, split: str) -> int:
        """Bytes of the split's table, a little more than its text."""
        return int(self._split(split).data.nbytes)

    def chunks(self, split: str) -> Iterator[bytes]:
        """Rows as lines.

        Raises:
            InputError: the data set is neither cached nor reachable, or the split is empty.
        """
        rows = self._split(split)
        if not len(rows):
            raise InputError(
                f"{self.key(Path())}: split {split} is empty; delete its copy in the Hugging Face cache"
            )
        for batch in rows.iter(batch_size=ROWS_PER_CHUNK):
            yield "".join(row.removesuffix("\n") + "\n" for row in batch["text"]).encode()

    def _split(self, split: str) -> Any:
        if self._splits is None:
            self._splits = self._load()
        return self._splits[HUB_SPLITS[split]]

    def _load(self) -> dict[str, Any]:
        import datasets

        configuration = CONFIGURATIONS[self.source]
        try:
            return datasets.load_dataset(REPOSITORY, configuration, revision=REVISION)
        except Exception as error:  # the hub's client raises many unrelated kinds
            reason = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"data.source={self.source.value}: cannot get {REPOSITORY} {configuration} from the hub "
                f"({type(error).__name__}: {reason}); without a network, put wiki.train.tokens, "
                "wiki.valid.tokens and wiki.test.tokens into a folder by hand and give data=files "
                "data.folder=FOLDER, or copy data.cache_folder from a machine that has prepared it"
            ) from error
