"""The one writer: what a failed write leaves, and that nothing is replaced in another way."""

import errno
import re
from pathlib import Path
from typing import BinaryIO

import pytest

from allattn.files import copy_atomically, new_folder, write_atomically

PACKAGE = Path(__file__).parents[1] / "allattn"
NOT_REPLACED = {  # the only files written otherwise
    "files.py",
    "training/exports.py",  # inside a new folder
    "training/weight_files.py",  # inside the same one
    "training/metrics.py",  # a row is appended
    "head_study/record.py",  # likewise
    "training/wandb_run.py",  # into W&B's own folder of the run
    "huggingface/pruned.py",  # inside a new folder
    "commands/remove.py",  # inside a new folder
    "data/corpus.py",  # inside a new folder
    "benchmark/memory.py",  # the kernel's
    "commands/streams.py",  # what nobody reads
    "huggingface/tokenization.py",  # by transformers' saving, into its folder
}


def full_disk(file: BinaryIO) -> None:
    file.write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_text_bytes_functions_and_copies_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, expected in (
        ("ä\r\n", b"\xc3\xa4\r\n"),
        (b"\xff", b"\xff"),
        (lambda file: file.write(b"123"), b"123"),
    ):
        write_atomically(path, content)
        assert path.read_bytes() == expected
    copy_atomically(path, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"123"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_keeps_the_earlier_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    write_atomically(path, "earlier")

    def interrupted(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(error) as caught:
        write_atomically(path, full_disk if error is OSError else interrupted)
    if error is OSError:
        assert str(caught.value) == f"[Errno {errno.ENOSPC}] No space left on device: '{path}'"
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none/file'$"):
        write_atomically(tmp_path / "none" / "file", "text")


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder"

    def fill_half() -> None:
        with new_folder(target) as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half()
    assert not list(tmp_path.iterdir())
    with new_folder(target) as folder:
        (folder / "whole").touch()
        assert not target.exists()
    with pytest.raises(OSError, match="not empty"), new_folder(target) as folder:
        (folder / "other").touch()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["folder", "folder/whole"]


def test_no_module_replaces_files_in_another_way() -> None:
    ways = re.compile(r"\.write_(text|bytes)\(|os\.(replace|rename)\(|open\([^)]*[\"'][wax]|copyfile\(")
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if ways.search(p.read_text())}
    assert found == NOT_REPLACED
