"""Disks that are full or read-only: real ones, small tmpfs mounts, so these tests need the right to mount."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.exports import save_export

from allattn.data.config import DataConfig
from allattn.data.corpus import prepare
from allattn.errors import InputError
from allattn.training.checkpoints import read_checkpoint
from allattn.training.exports import load_export
from allattn.training.language_task import LanguageTask
from allattn.training.run_folder import RunFolder, open_run_folder

Rows = Callable[[RunFolder], list[dict[str, str]]]
PAGE = 4096


class Disk:
    """A mounted file system of a few MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.filler = path / "filler"

    def fill(self, left: int = 0) -> None:
        """Leave room for `left` bytes, in whole pages."""
        self.filler.unlink(missing_ok=True)
        with self.filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"\0" * PAGE):
                    pass
            except OSError:
                pass
            size = file.tell()
            file.truncate(max(0, size - left - size % PAGE))

    def free(self) -> None:
        self.filler.unlink()

    def read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An empty disk of 4 MiB; skipped where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def at_step(step: int, act: Callable[[], Any]) -> Iterator[None]:
    """Call `act` at the beginning of optimizer step `step`."""
    original = LanguageTask.training_step

    def training_step(self: LanguageTask, batch: Any, batch_idx: int) -> Any:
        if self.global_step == step - 1:
            act()
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "training_step", training_step)
        yield


def no_leftovers(folder: Path) -> bool:
    return not list(folder.rglob("*.partial"))


@pytest.mark.parametrize("left", [0, 2 * PAGE], ids=["no room", "room for the metrics"])
def test_full_while_a_checkpoint_is_written(
    runs_below: Callable[[Path], Any], runs: Any, rows: Rows, disk: Disk, left: int
) -> None:
    """The run saves every 3 steps; the disk is full from step 5 on. Freed, it goes on as if nothing was."""
    changes = {"model__width": 32, "eval__interval": 0}
    own = runs_below(disk.path)
    settings = own.pretraining("run", **changes)
    folder = own.at(settings)
    with at_step(5, lambda: disk.fill(left)), pytest.raises(OSError, match=r"No space|checkpoint") as error:
        own.run(settings)
    written = folder.metrics if left == 0 and str(folder.metrics) in str(error.value) else folder.last
    assert str(written) in str(error.value), "the message names the path"
    saved = read_checkpoint(folder.last)["allattn"]["step"]
    assert saved == 3, "the earlier checkpoint is intact"
    assert no_leftovers(folder.path)
    assert not folder.result.exists()
    disk.free()
    own.run(settings)
    whole = runs.run(runs.pretraining("whole", **changes))
    assert rows(folder) == rows(whole)
    assert json.loads(folder.result.read_text())["dense"]["test"] == (whole.finished() or {})["dense"]["test"]


def test_full_while_the_best_checkpoint_is_copied(runs_below: Callable[[Path], Any], disk: Disk) -> None:
    """There is room for one more checkpoint, best.ckpt, and not for its copy."""
    own = runs_below(disk.path)
    settings = own.pretraining("run", model__width=32, eval__interval=4, trainer__checkpoint_interval=3)
    folder = own.at(settings)

    def fill() -> None:
        disk.fill(folder.last.stat().st_size + 8 * PAGE)

    with at_step(4, fill), pytest.raises(OSError, match="No space") as error:
        own.run(settings)
    assert str(folder.last) in str(error.value)
    assert read_checkpoint(folder.last)["allattn"]["step"] == 3
    assert read_checkpoint(folder.best)["allattn"]["step"] == 4
    assert no_leftovers(folder.path)


def test_full_while_the_result_is_written(
    runs_below: Callable[[Path], Any], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = runs_below(disk.path)
    settings = own.pretraining("run")
    write = RunFolder.write_result

    def full(self: RunFolder, result: dict[str, Any]) -> None:
        disk.fill()
        write(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_result", full)
        with pytest.raises(OSError, match=r"No space.*result\.json"):
            own.run(settings)
    assert no_leftovers(own.at(settings).path)
    disk.free()
    assert own.run(settings).finished() is not None


def test_full_while_a_cache_is_written(data: DataConfig, tmp_path: Path, disk: Disk) -> None:
    """The cache of another text stays; of the new one there is nothing, or all of it once there is room."""
    small = replace(data, cache_folder=str(disk.path / "cache"))
    before = prepare(small, progress=False).splits["train"].ids.tolist()
    folder = tmp_path / "large"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text("a b c d\n" * 50_000)  # 1 MB of ids each
    large = replace(small, folder=str(folder))
    disk.fill(100 * PAGE)
    with pytest.raises(InputError, match=r"data\.cache_folder=.*No space left.*free space there"):
        prepare(large, progress=False)
    assert no_leftovers(disk.path)
    assert len(list(disk.path.glob("cache/*/meta.json"))) == 1
    assert prepare(small, progress=False).splits["train"].ids.tolist() == before
    disk.free()
    assert prepare(large, progress=False).splits["train"].tokens == 250_000


def test_full_while_an_export_is_written(dense_run: RunFolder, disk: Disk) -> None:
    save_export(dense_run.last, disk.path / "first")
    disk.fill(PAGE)
    with pytest.raises(InputError, match=r"second: the export cannot be written \(.*space"):
        save_export(dense_run.last, disk.path / "second")
    assert no_leftovers(disk.path)
    assert not (disk.path / "second").exists()
    load_export(disk.path / "first")
    disk.free()
    save_export(dense_run.last, disk.path / "second")
    load_export(disk.path / "second")


def test_full_before_a_run_begins(runs_below: Callable[[Path], Any], disk: Disk) -> None:
    own = runs_below(disk.path)
    settings = own.pretraining("run")
    disk.fill()
    with pytest.raises((InputError, OSError), match=str(own.at(settings).path)):
        own.run(settings)
    assert no_leftovers(disk.path)


def test_read_only_disk_is_refused_before_training(
    runs_below: Callable[[Path], Any], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = runs_below(disk.path)
    begun = own.pretraining("begun", schedule__steps=3)
    own.run(begun)
    own.at(begun).result.unlink()
    disk.read_only()
    monkeypatch.setattr(
        import_module("allattn.stages.pretrain"), "prepare", lambda *_: pytest.fail("the text was prepared")
    )
    for settings in (own.pretraining("new"), begun):
        with pytest.raises(InputError, match="the run folder cannot be written") as error:
            own.run(settings)
        assert str(own.at(settings).path) in str(error.value)


def test_read_only_cache_is_refused_or_used(data: DataConfig, tmp_path: Path, disk: Disk) -> None:
    """What is there is read, from a copy of the text too, without a lock or note; the rest cannot be made."""
    config = replace(data, cache_folder=str(disk.path / "cache"))
    expected = prepare(config, progress=False).splits["train"].tokens
    for file in [*disk.path.glob("cache/*.lock"), *disk.path.glob("cache/*/checked")]:
        file.unlink()
    disk.read_only()
    assert prepare(config, progress=False).splits["train"].tokens == expected
    shutil.copytree(str(data.folder), tmp_path / "copy")
    copied = replace(config, folder=str(tmp_path / "copy"))
    assert prepare(copied, progress=False).splits["train"].tokens == expected
    with pytest.raises(InputError, match=r"data\.cache_folder=.*another folder"):
        prepare(replace(config, minimum_count=2), progress=False)


def test_full_while_a_run_folder_is_opened(disk: Disk) -> None:
    with open_run_folder(disk.path / "run", {"seed": 1}, False) as folder:
        before = folder.config.read_text()
    disk.fill()
    with (
        pytest.raises(InputError, match="cannot be written"),
        open_run_folder(disk.path / "run", {"seed": 1, "text": "x" * 9000}, True),
    ):
        pass
    assert folder.config.read_text() == before
    assert no_leftovers(disk.path)
