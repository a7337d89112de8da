from pathlib import Path

import pytest

from allattn.data.config import DataConfig, Source

SMALL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "wikitext-small"


@pytest.fixture
def wikitext_small() -> Path:
    """Folder of the 60-article WikiText sample."""
    if not SMALL.is_dir():
        pytest.skip(f"the small WikiText sample is not at {SMALL}")
    return SMALL


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Three tiny splits; train: 4 lines, 11 tokens."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_bytes(b" the cat \n\n the dog <unk> \n the cat\n")
    (folder / "wiki.valid.tokens").write_bytes(b"the bird\n")
    (folder / "wiki.test.tokens").write_bytes(b"\na dog\n")
    return folder


@pytest.fixture
def files_config(text_folder: Path, tmp_path: Path) -> DataConfig:
    """The tiny splits at word level with their own cache."""
    return DataConfig(source=Source.files, folder=str(text_folder), cache_folder=str(tmp_path / "cache"))
