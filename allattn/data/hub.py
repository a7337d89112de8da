"""WikiText from the Hugging Face hub."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allattn.data.config import Source
from allattn.errors import InputError, first_line

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # a commit, so that the text cannot change under a name
CONFIGURATIONS = {
    Source.wikitext103: "wikitext-103-v1",
    Source.wikitext2: "wikitext-2-v1",
    Source.wikitext103_raw: "wikitext-103-raw-v1",
    Source.wikitext2_raw: "wikitext-2-raw-v1",
}
# Rows of each split, and bytes: UTF-8 as stored, where a blank row holds nothing, and 4 a row. From the data
# set's card (`num_examples`, `num_bytes`) at REVISION.
PUBLISHED = {
    Source.wikitext103: {
        "train": (1_801_350, 545_141_915),
        "valid": (3_760, 1_154_751),
        "test": (4_358, 1_295_575),
    },
    Source.wikitext2: {
        "train": (36_718, 10_918_118),
        "valid": (3_760, 1_134_123),
        "test": (4_358, 1_270_947),
    },
    Source.wikitext103_raw: {
        "train": (1_801_350, 546_500_949),
        "valid": (3_760, 1_159_288),
        "test": (4_358, 1_305_088),
    },
    Source.wikitext2_raw: {
        "train": (36_718, 11_061_717),
        "valid": (3_760, 1_159_288),
        "test": (4_358, 1_305_088),
    },
}
BYTES_PER_ROW = 4
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
            InputError: the data set is neither cached nor reachable, is of another revision, or has not the
                published rows and bytes.
        """
        rows = size = 0
        for batch in self._split(split).iter(batch_size=ROWS_PER_CHUNK):
            texts = batch["text"]
            rows += len(texts)
            size += sum(len(text.encode()) for text in texts) + BYTES_PER_ROW * len(texts)
            yield "".join(text.removesuffix("\n") + "\n" for text in texts).encode()
        published = PUBLISHED[self.source][split]
        if (rows, size) != published:
            raise InputError(
                f"data.source={self.source.value}: rows and bytes of split {split} are {rows}, {size}, "
                f"published are {published[0]}, {published[1]}; delete its copy in the Hugging Face cache "
                "and start again"
            )

    def _split(self, split: str) -> Any:
        if self._splits is None:
            self._splits = self._load()
        return self._splits[HUB_SPLITS[split]]

    def _load(self) -> dict[str, Any]:
        import datasets

        configuration = CONFIGURATIONS[self.source]
        if str(datasets.config.HF_DATASETS_CACHE).startswith("~"):  # it would become a folder of that name
            raise InputError(
                f"data.source={self.source.value}: there is no home folder for the Hugging Face cache; "
                "set HF_HOME to a folder"
            )
        try:
            splits: dict[str, Any] = datasets.load_dataset(REPOSITORY, configuration, revision=REVISION)
        except Exception as error:  # the hub's client raises many unrelated kinds
            raise InputError(
                f"data.source={self.source.value}: cannot get {REPOSITORY} {configuration} from the hub "
                f"({type(error).__name__}: {first_line(error)}); without a network, put wiki.train.tokens, "
                "wiki.valid.tokens and wiki.test.tokens into a folder by hand and give "
                "data.source=files data.folder=FOLDER, or copy data.cache_folder from a machine that has "
                "prepared it"
            ) from error
        for folder in _folders(splits):
            if re.fullmatch("[0-9a-f]{40}", folder.name) and folder.name != REVISION:
                raise InputError(
                    f"data.source={self.source.value}: the hub cannot be reached, and the newest copy in "
                    f"the Hugging Face cache, {folder}, is of another revision than {REVISION}; remove "
                    "that copy, or start once where the hub can be reached"
                )
        return splits


def _folders(splits: dict[str, Any]) -> set[Path]:
    """Where the splits lie in the Hugging Face cache: a folder named by the commit that they come from.

    Without the hub, `datasets` takes the newest copy whatever revision it is asked for.
    """
    return {Path(file["filename"]).parent for rows in splits.values() for file in rows.cache_files}
