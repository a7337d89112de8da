"""One way to name a model for every command: a checkpoint or an export, and the device."""

import json
from pathlib import Path

import pytest
from support.command_fixtures import CommandLine, Ended

from allattn.commands.opened import device_named
from allattn.data.config import DataConfig
from allattn.errors import InputError
from allattn.training.run_folder import RunFolder

ON_SAVED = ("evaluate", "generate", "heads", "export", "benchmark")


@pytest.fixture
def exported(command_line: CommandLine, dense_run: RunFolder, tmp_path: Path) -> Path:
    """An export of the dense run."""
    done = command_line("export", f"checkpoint={dense_run.last}", "folder=exported", "progress=false")
    assert done.status == 0, done.err
    return tmp_path / "exported"


def test_an_export_is_scored_as_its_checkpoint(
    command_line: CommandLine, dense_run: RunFolder, exported: Path, data: DataConfig
) -> None:
    text = ["data.source=files", f"data.folder={data.folder}", f"data.cache_folder={data.cache_folder}"]
    one, other = (
        command_line("evaluate", f"checkpoint={path}", *text, "eval.segment_length=8", "device=cpu")
        for path in (dense_run.last, exported)
    )
    assert one.status == 0, one.err
    assert (other.status, other.out) == (0, one.out), other.err


def test_an_export_without_a_text_to_score_is_one_line(command_line: CommandLine, exported: Path) -> None:
    done = command_line("evaluate", f"checkpoint={exported}", "eval.segment_length=8")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "an export does not say on what text" in done.err


def test_a_run_folder_and_no_path_are_answered_with_what_to_give(
    command_line: CommandLine, dense_run: RunFolder
) -> None:
    for given, words in ((dense_run.path, f"give its checkpoint, {dense_run.last}"), ("", "give the path")):
        done = command_line("heads", f"checkpoint={given}")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert words in done.err


def test_heads_of_an_export_are_those_of_its_checkpoint(
    command_line: CommandLine, dense_run: RunFolder, exported: Path
) -> None:
    def record(path: Path) -> dict[str, object]:
        done = command_line("heads", f"checkpoint={path}", "format=json")
        assert done.status == 0, done.err
        return json.loads(done.out)

    own = record(dense_run.last)
    assert record(exported) == own | {"phase": "export", "step": None}
    assert "exported" in command_line("heads", f"checkpoint={exported}").out


def test_what_does_not_start_from_an_export_says_what_does(command_line: CommandLine, exported: Path) -> None:
    pruned = command_line("prune", "experiment=demo", "logger=none", f"checkpoint={exported}")
    again = command_line("export", f"checkpoint={exported}", "folder=second")
    for done, words in ((pruned, "give the training checkpoint"), (again, "is an export already")):
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert f"{exported}: is a" in done.err
        assert words in done.err


@pytest.mark.parametrize("device", ["cuda:77", "meta", "gpu"])
def test_a_device_that_is_not_there_is_one_line(
    command_line: CommandLine, dense_run: RunFolder, device: str
) -> None:
    def refused(name: str) -> Ended:
        more = {"export": ["folder=out"], "benchmark": ["peak_memory=false"]}.get(name, [])
        return command_line(name, f"checkpoint={dense_run.last}", f"device={device}", *more)

    for name in ON_SAVED:
        done = refused(name)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert done.err.startswith(f"error: device={device} cannot be used here")


def test_a_device_is_named_as_torch_does() -> None:
    assert device_named("cpu").type == "cpu"
    assert device_named("auto").type in ("cpu", "cuda")
    with pytest.raises(InputError, match="give auto, cpu, cuda or cuda:N"):
        device_named("tpu")
