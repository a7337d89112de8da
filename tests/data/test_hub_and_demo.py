from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from allattn.data import corpus, hub
from allattn.data.config import DataConfig, Source
from allattn.data.demo import PydocSource, spaced, split_topics
from allattn.data.encoded import SPLITS
from allattn.data.hub import HubSource
from allattn.errors import InputError

ROWS = {"train": ["", " = T = \n", " a b \n"], "validation": [" a \n"], "test": ["", " b"]}
COUNTS = {"train": (3, 14 + 12), "valid": (1, 4 + 4), "test": (2, 2 + 8)}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, configuration: str, revision: str) -> None:
        raise ConnectionError("Couldn't reach the Hub\nwith a second line")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


@pytest.fixture
def stub_hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A hub that holds `ROWS`; returns the list of what was asked for."""
    asked: list[tuple[str, str]] = []

    def load(repository: str, configuration: str, revision: str) -> datasets.DatasetDict:
        assert revision == hub.REVISION
        asked.append((repository, configuration))
        splits = {split: datasets.Dataset.from_dict({"text": rows}) for split, rows in ROWS.items()}
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for source in Source:
        monkeypatch.setitem(hub.PUBLISHED, source, COUNTS)
    return asked


def test_a_row_is_a_line(stub_hub: list[tuple[str, str]]) -> None:
    for source, configuration in (
        (Source.wikitext103, "wikitext-103-v1"),
        (Source.wikitext2, "wikitext-2-v1"),
        (Source.wikitext103_raw, "wikitext-103-raw-v1"),
        (Source.wikitext2_raw, "wikitext-2-raw-v1"),
    ):
        text = HubSource(source)
        assert b"".join(text.chunks("train")) == b"\n = T = \n a b \n"
        assert b"".join(text.chunks("valid")) == b" a \n"
        assert b"".join(text.chunks("test")) == b"\n b\n"
        assert text.size("train") > 0
        assert stub_hub[-1] == ("Salesforce/wikitext", configuration)
    assert len(stub_hub) == 4


def test_published_rows_and_bytes_are_those_of_the_text(wikitext_small: Path) -> None:
    """The three files of the small sample are the validation split of WikiText-2, blank rows as b" \\n"."""
    text = b"".join((wikitext_small / f"wiki.{split}.tokens").read_bytes() for split in SPLITS)
    rows = [row if row.strip() else b"" for row in text.splitlines(keepends=True)]
    size = sum(map(len, rows)) + hub.BYTES_PER_ROW * len(rows)
    assert (len(rows), size) == hub.PUBLISHED[Source.wikitext2]["valid"]


@pytest.mark.parametrize(
    "rows", [["", " = T = \n"], ["", " = T = \n", " a c  \n"], []], ids=["row", "byte", "all"]
)
def test_text_that_lacks_something_is_refused(
    stub_hub: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str]
) -> None:
    """The raw variants too, for which no number of words is published."""
    monkeypatch.setitem(ROWS, "train", rows)
    config = DataConfig(
        source=Source.wikitext2_raw, tokenizer="bpe", vocabulary_size=257, cache_folder=str(tmp_path)
    )
    with pytest.raises(
        InputError, match=r"wikitext2_raw: rows and bytes of split train.*published are 3, 26"
    ):
        corpus.prepare(config, progress=False)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("revision", [hub.REVISION, "1" * 40], ids=["pinned", "another"])
def test_offline_copy_must_be_of_the_pinned_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    """A real copy in the layout of the `datasets` cache, and the hub out of reach."""
    for split, rows in ROWS.items():
        datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    copy = tmp_path / "cache" / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0" / revision
    made = datasets.load_dataset_builder(
        "parquet",
        "wikitext-2-raw-v1",
        data_files={split: str(tmp_path / f"{split}.parquet") for split in ROWS},
        cache_dir=str(tmp_path / "made"),
    )
    made.dataset_name = "wikitext"
    made.download_and_prepare(str(copy))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(hub.PUBLISHED, Source.wikitext2_raw, COUNTS)
    text = HubSource(Source.wikitext2_raw)
    if revision == hub.REVISION:
        assert b"".join(text.chunks("train")) == b"\n = T = \n a b \n"
    else:
        with pytest.raises(InputError, match=f"{copy}, is of another revision than {hub.REVISION}"):
            list(text.chunks("train"))


def test_no_home_folder_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("~/.cache/huggingface/datasets"))
    with pytest.raises(InputError, match=r"no home folder.*set HF_HOME"):
        list(HubSource(Source.wikitext2).chunks("train"))


def test_offline_says_what_to_do(offline: None, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        corpus.prepare(DataConfig(source=Source.wikitext103, cache_folder=str(tmp_path)), progress=False)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "data.source=wikitext103",
        "wikitext-103-v1",
        "Couldn't reach",
        "data.source=files",
        "data.folder=",
    ):
        assert part in message
    assert not list(tmp_path.glob("*/meta.json"))


def test_wrong_counts_stop_preparation_and_leave_nothing(
    stub_hub: list[tuple[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        corpus.prepare(DataConfig(source=Source.wikitext103, cache_folder=str(tmp_path)), progress=False)
    for part in ("wikitext103", "8, 2, 3", "103227021, 217646, 245569", "267735"):
        assert part in str(caught.value)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("vocabulary", "refused"), [(6, False), (7, True)], ids=["as published", "one word more"]
)
def test_right_counts_pass(
    stub_hub: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
    refused: bool,
) -> None:
    monkeypatch.setitem(corpus.PUBLISHED, Source.wikitext103, ((8, 2, 3), vocabulary))
    config = DataConfig(source=Source.wikitext103, cache_folder=str(tmp_path))
    if refused:
        with pytest.raises(InputError, match="published"):
            corpus.prepare(config, progress=False)
    else:
        assert corpus.prepare(config, progress=False).vocabulary_size == vocabulary


def test_second_start_needs_no_hub(
    stub_hub: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(
        source=Source.wikitext2_raw, tokenizer="bpe", vocabulary_size=257, cache_folder=str(tmp_path)
    )
    first = corpus.prepare(config, progress=False)
    fail: Callable[..., None] = lambda *arguments: pytest.fail("asked the hub again")  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert corpus.prepare(config, progress=False).fingerprint == first.fingerprint


def test_another_revision_is_another_text(
    stub_hub: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of the package that pins another revision does not open the earlier one's cache."""
    config = DataConfig(
        source=Source.wikitext2_raw, tokenizer="bpe", vocabulary_size=257, cache_folder=str(tmp_path)
    )
    first = corpus.prepare(config, progress=False)
    monkeypatch.setattr(hub, "REVISION", "0" * 40)
    monkeypatch.setitem(ROWS, "train", ["other text\n"])
    monkeypatch.setitem(hub.PUBLISHED, Source.wikitext2_raw, COUNTS | {"train": (1, 11 + 4)})
    second = corpus.prepare(config, progress=False)
    assert len(stub_hub) == 2
    assert second.fingerprint != first.fingerprint
    assert second.splits["train"].words == 3


def test_raw_text_is_refused_at_word_level(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wikitext103_raw"):
        corpus.prepare(DataConfig(source=Source.wikitext103_raw, cache_folder=str(tmp_path)), progress=False)


def test_demo_is_dealt_out_the_same_way_whatever_the_order() -> None:
    topics = {f"topic {i}": f"word{i} " * (20 + i) for i in range(100)}
    splits = split_topics(topics)
    assert split_topics(dict(reversed(topics.items()))) == splits
    total = sum(map(len, splits.values()))
    assert {split: round(len(text) / total, 1) for split, text in splits.items()} == {
        "train": 0.8,
        "valid": 0.1,
        "test": 0.1,
    }
    words = {split: set(text.split()) for split, text in splits.items()}
    assert sum(map(len, words.values())) == len(set.union(*words.values())) == 100  # no topic in two splits


def test_demo_lines_are_words_and_punctuation() -> None:
    assert spaced('   raise TypeError("x[0]") from e...  ') == 'raise TypeError ( " x [ 0 ] " ) from e ...'
    assert spaced("*****") == "*****"
    assert spaced("") == ""


def test_demo_of_this_python(tmp_path: Path) -> None:
    result = corpus.prepare(DataConfig(cache_folder=str(tmp_path)), progress=False)
    assert result.splits["train"].tokens > 50_000
    assert result.splits["valid"].tokens > 3_000
    assert result.splits["test"].tokens > 3_000
    assert PydocSource().key(tmp_path) == result.fingerprint
