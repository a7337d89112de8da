"""Two gloo processes and one, and any accumulation, give the same loss curve, gates and scores."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import PATIENCE, ROOT, KillIn, last_step, numbers, run, start, start_two, wait_for_both

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]
TWO = ("trainer.devices=2", "trainer.strategy=ddp")
GROUPS = {"one": 1, "groups_2": 2, "groups_4": 4}
STEPS = 12
RELATIVE = 1e-5


def run_in_several(script: str, arguments: list[str]) -> str:
    """Run a command that starts its other processes itself; what all printed."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments) -> dict[str, RunFolder]:
    """The same pretraining in one process, in two, and with 2 and 4 accumulation groups; no dropout."""
    base = tmp_path_factory.mktemp("trained")
    folders = {name: RunFolder(base / name) for name in ("one", "two", "groups_2", "groups_4")}
    steps = f"schedule.steps={STEPS}"
    for name, folder in folders.items():
        arguments = pretraining(folder, steps, dropout=0.0)
        if name == "two":
            run_in_several("train.py", [*arguments, *TWO])
        else:
            run(base / "output", "train.py", *arguments, f"trainer.accumulation={GROUPS[name]}")
    return folders


@pytest.fixture(scope="module")
def pruned(
    tmp_path_factory: pytest.TempPathFactory, pruning: Arguments, dense_without_dropout: RunFolder
) -> dict[str, RunFolder]:
    """The same pruning run in one process, in two, and with two accumulation groups."""
    base = tmp_path_factory.mktemp("pruned")
    folders = {name: RunFolder(base / name) for name in ("one", "two", "groups_2")}
    for name, folder in folders.items():
        arguments = pruning(folder, dense_without_dropout.last)
        if name == "two":
            run_in_several("prune.py", [*arguments, *TWO])
        else:
            run(
                base / "output",
                "prune.py",
                *arguments,
                f"trainer.accumulation={name[-1] if '_' in name else 1}",
            )
    return folders


def result(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.result.read_text())


def assert_close_weights(folder: RunFolder, expected: RunFolder) -> None:
    ours, theirs = (read_checkpoint(f.last)["state_dict"] for f in (folder, expected))
    assert ours.keys() == theirs.keys()
    for name in ours:
        # LAMB turns gradients near rounding into steps of full size, so single entries may differ more.
        difference = float((ours[name] - theirs[name]).norm() / (1e-6 + theirs[name].norm()))
        assert difference < 1e-3, name


@pytest.mark.parametrize("name", ["two", "groups_2", "groups_4"])
def test_pretraining_has_the_same_curve(trained: dict[str, RunFolder], name: str) -> None:
    for column in ("loss", "gradient_norm", "learning_rate", "tokens_seen", "valid_loss"):
        expected = numbers(trained["one"], column)
        assert numbers(trained[name], column) == pytest.approx(expected, rel=RELATIVE), column
    assert len(numbers(trained[name], "loss")) == STEPS
    losses = numbers(trained["one"], "loss")
    assert min(losses) < losses[0] - 0.05, "the weights moved, so equal losses mean equal updates"
    ours, theirs = (result(trained[n])["dense"] for n in (name, "one"))
    for split in ("valid", "test"):
        assert ours[split]["tokens_scored"] == theirs[split]["tokens_scored"]
        assert ours[split]["perplexity"] == pytest.approx(theirs[split]["perplexity"], rel=RELATIVE)
    assert_close_weights(trained[name], trained["one"])


def test_two_nodes_have_the_same_curve(
    trained: dict[str, RunFolder], tmp_path: Path, pretraining: Arguments
) -> None:
    folder = RunFolder(tmp_path / "nodes")
    nodes = ("trainer.devices=1", "trainer.num_nodes=2", "trainer.strategy=ddp")
    arguments = pretraining(folder, f"schedule.steps={STEPS}", *nodes, dropout=0.0)
    started = start_two(tmp_path, "train.py", *arguments, nodes=2)
    assert wait_for_both(started) == [0, 0], [one.output for one in started]
    losses = numbers(folder, "loss")
    assert len(losses) == STEPS
    assert losses == pytest.approx(numbers(trained["one"], "loss"), rel=RELATIVE)
    assert_close_weights(folder, trained["one"])


@pytest.mark.parametrize("name", ["two", "groups_2"])
def test_pruning_has_the_same_curve_and_heads(pruned: dict[str, RunFolder], name: str) -> None:
    ours, theirs = (result(pruned[n]) for n in (name, "one"))
    assert ours["pruned"]["heads_kept"] == theirs["pruned"]["heads_kept"]
    assert 0 < theirs["pruned"]["sparsity"] < 1, "some heads were closed and some kept"
    for column in ("loss", "loss_total", "penalty", "lambda", "sparsity_sampled", "sparsity", "valid_loss"):
        expected = numbers(pruned["one"], column)
        assert numbers(pruned[name], column) == pytest.approx(expected, rel=1e-4), column
    assert len(numbers(pruned[name], "loss")) == 24
    for stage in ("dense", "pruned"):
        for split in ("valid", "test"):
            expected = theirs[stage][split]["perplexity"]
            assert ours[stage][split]["perplexity"] == pytest.approx(expected, rel=1e-4)
    gates, expected_gates = (read_checkpoint(pruned[n].gates)["state_dict"] for n in (name, "one"))
    for layer in range(2):
        torch.testing.assert_close(
            gates[f"gates.pi.{layer}"], expected_gates[f"gates.pi.{layer}"], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", ["two", "groups_2", "groups_4"])
def test_memory_is_saved_by_stream(trained: dict[str, RunFolder], name: str) -> None:
    """However the streams were shared out, a checkpoint holds them in one order."""
    one, other = (read_checkpoint(trained[n].last)["allattn"]["memory"] for n in ("one", name))
    assert [layer.shape for layer in other] == [(4, 4, 16)] * 2
    for ours, theirs in zip(other, one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(ours[0], ours[1])


def go_on(folder: RunFolder, arguments: list[str], processes: int) -> None:
    """Continue a run as if it had been stopped where it ended."""
    folder.result.unlink(missing_ok=True)
    if processes == 1:
        run(folder.path.parent / "output", "train.py", *arguments, "resume=changed")
    else:
        several = [f"trainer.devices={processes}", "trainer.strategy=ddp", "resume=changed"]
        run_in_several("train.py", [*arguments, *several])


def test_streams_go_on_however_they_are_shared_out(tmp_path: Path, pretraining: Arguments) -> None:
    """Processes x groups: 1 x 4 until step 4, 2 x 2 until step 8, 4 x 1 to the end; no dropout."""
    folder, whole = RunFolder(tmp_path / "shared_out"), RunFolder(tmp_path / "whole")
    level = ("schedule.shape=constant", "schedule.warmup_steps=0")
    go_on(whole, pretraining(whole, f"schedule.steps={STEPS}", *level, dropout=0.0), 1)
    for processes, groups, until in ((1, 4, 4), (2, 2, 8), (4, 1, STEPS)):
        steps = (f"schedule.steps={until}", f"trainer.accumulation={groups}")
        go_on(folder, pretraining(folder, *steps, *level, dropout=0.0), processes)
    for column in ("loss", "gradient_norm", "tokens_seen"):
        expected = numbers(whole, column)
        assert numbers(folder, column) == pytest.approx(expected, rel=RELATIVE), column
    assert_close_weights(folder, whole)


def test_another_number_of_processes_must_be_asked_for(
    tmp_path: Path, trained: dict[str, RunFolder], pretraining: Arguments
) -> None:
    """Where there is dropout, its noise is drawn by process."""
    shutil.copytree(trained["two"].path, tmp_path / "two")
    folder = RunFolder(tmp_path / "two")
    folder.result.unlink()
    saved = folder.last.read_bytes()
    arguments = pretraining(folder, f"schedule.steps={STEPS}", dropout=0.0)
    started = start(tmp_path / "output", "train.py", *arguments)
    assert started.wait() == 2
    assert "trainer.devices: 2 -> 1" in started.output
    assert "resume=changed" in started.output
    assert folder.last.read_bytes() == saved


@pytest.fixture(scope="module")
def selecting(pruning: Arguments, dense_without_dropout: RunFolder) -> Arguments:
    """Arguments of a pruning run that chooses 4 of 8 heads without gates."""

    def arguments(folder: RunFolder, *changes: str) -> list[str]:
        choice = ("gates.selection=magnitude", "gates.target_sparsity=0.5")
        return pruning(folder, dense_without_dropout.last, *choice, *changes)

    return arguments


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory, selecting: Arguments) -> RunFolder:
    """That run in one process."""
    base = tmp_path_factory.mktemp("selected")
    folder = RunFolder(base / "one")
    run(base / "output", "prune.py", *selecting(folder))
    return folder


def assert_same_selection(folder: RunFolder, selected: RunFolder) -> None:
    assert result(folder)["pruned"]["heads_kept"] == result(selected)["pruned"]["heads_kept"]
    assert numbers(folder, "loss") == pytest.approx(numbers(selected, "loss"), rel=1e-4)
    assert result(folder)["steps"] == len(numbers(folder, "loss")) == 24


def test_one_of_two_processes_scores_the_heads(
    tmp_path: Path, selecting: Arguments, selected: RunFolder
) -> None:
    """Both started from outside: the second waits for the cut model of the first, which is slow."""
    folder = RunFolder(tmp_path / "run")
    slow = KillIn("allattn.stages.prune:select_heads", 1, number=signal.SIGSTOP)
    seen = KillIn("allattn.stages.prune:select_heads", 1, number=signal.SIGCONT)  # which ends nothing
    started = start_two(tmp_path, "prune.py", *selecting(folder, *TWO), kill_in=(slow, seen))
    first, second = started
    first.wait_for_moment()
    second.wait_for(2)
    first.send(signal.SIGCONT)
    statuses = wait_for_both(started)
    assert statuses == [0, 0], first.output + second.output
    assert not second.reached_the_moment, "it scored the heads too"
    assert_same_selection(folder, selected)


def test_every_removal_is_waited_for(
    tmp_path: Path, pruning: Arguments, dense_without_dropout: RunFolder
) -> None:
    """The first process is slow to score the heads for the second of three removals."""
    choice = ("gates.selection=iterative", "gates.iterations=3", "gates.target_sparsity=0.5")
    one, folder = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    run(tmp_path / "output", "prune.py", *pruning(one, dense_without_dropout.last, *choice))
    slow = KillIn("allattn.stages.prune:select_heads", 2, number=signal.SIGSTOP)
    arguments = pruning(folder, dense_without_dropout.last, *choice, *TWO)
    first, second = started = start_two(tmp_path, "prune.py", *arguments, kill_in=(slow, None))
    first.wait_for_moment()
    assert read_checkpoint(folder.last)["allattn"]["step"] == 8
    second.wait_for(2)
    first.send(signal.SIGCONT)
    statuses = wait_for_both(started)
    assert statuses == [0, 0], first.output + second.output
    assert_same_selection(folder, one)
    assert result(folder)["updates_after_cut"] == 8


def test_process_that_is_started_later_takes_the_cut_model(
    tmp_path: Path, selecting: Arguments, selected: RunFolder
) -> None:
    folder = RunFolder(tmp_path / "run")
    printed = run_in_several("prune.py", selecting(folder, *TWO))
    assert printed.count("remove 4 of 8 heads") == 1
    assert_same_selection(folder, selected)


@pytest.fixture
def at_the_freeze(tmp_path: Path, pruned: dict[str, RunFolder]) -> RunFolder:
    """The run in two processes as a kill leaves it that comes after the freeze's save, before the removal."""
    shutil.copytree(pruned["two"].path, tmp_path / "two")
    folder = RunFolder(tmp_path / "two")
    folder.gates.replace(folder.last)
    folder.result.unlink()
    return folder


def test_goes_on_at_the_freeze(
    at_the_freeze: RunFolder,
    tmp_path: Path,
    pruned: dict[str, RunFolder],
    pruning: Arguments,
    dense_without_dropout: RunFolder,
) -> None:
    """Processes all started from outside (torchrun, Slurm); the first is slow to remove the heads."""
    arguments = pruning(at_the_freeze, dense_without_dropout.last, *TWO)
    slow = KillIn("allattn.stages.prune:cut_checkpoint", 1, number=signal.SIGSTOP)
    first, second = started = start_two(tmp_path, "prune.py", *arguments, kill_in=(slow, None))
    first.wait_for_moment()
    second.wait_for(2)
    first.send(signal.SIGCONT)
    statuses = wait_for_both(started)
    assert statuses == [0, 0], started[0].output + started[1].output
    assert numbers(at_the_freeze, "loss") == numbers(pruned["two"], "loss")


def test_first_process_may_be_the_slower_one(
    tmp_path: Path, pretraining: Arguments, trained: dict[str, RunFolder]
) -> None:
    """The second does not need what the first has not yet made."""
    folder = RunFolder(tmp_path / "run")
    arguments = pretraining(folder, f"schedule.steps={STEPS}", *TWO, dropout=0.0)
    slow = KillIn("allattn.stages.run:open_run_folder", 1, number=signal.SIGSTOP)
    first, second = started = start_two(tmp_path, "train.py", *arguments, kill_in=(slow, None))
    first.wait_for_moment()
    second.wait_for(2)
    first.send(signal.SIGCONT)
    statuses = wait_for_both(started)
    assert statuses == [0, 0], started[1].output
    assert numbers(folder, "loss") == pytest.approx(numbers(trained["two"], "loss"), rel=RELATIVE)


@pytest.mark.parametrize("told", [0, 1])
def test_signal_to_one_process_stops_both(
    tmp_path: Path, pruning: Arguments, dense_without_dropout: RunFolder, told: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    shutil.copy(dense_without_dropout.tokenizer, folder.tokenizer)
    started = start_two(tmp_path, "prune.py", *pruning(folder, dense_without_dropout.last, *TWO))
    started[told].send_when(signal.SIGTERM, lambda: last_step(folder) >= 3)
    statuses = wait_for_both(started)
    assert statuses == [143, 143], started[0].output + started[1].output
    assert read_checkpoint(folder.last)["allattn"]["step"] == last_step(folder) < 12


def saved_step(checkpoint: Path) -> int:
    return read_checkpoint(checkpoint)["allattn"]["step"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_second_process_waits_for_the_last_checkpoint_at_the_freeze(
    tmp_path: Path, pruning: Arguments, dense_without_dropout: RunFolder, strategy: str
) -> None:
    """The best checkpoint, which becomes the last one, is that of the freeze; the first process is slow."""
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense_without_dropout.last, *TWO, f"trainer.strategy={strategy}")
    slow = KillIn("allattn.training.between_steps:copy_atomically", 2, number=signal.SIGSTOP)
    first, second = started = start_two(tmp_path, "prune.py", *arguments, kill_in=(slow, None))
    first.wait_for_moment()
    assert (saved_step(folder.best), saved_step(folder.last)) == (12, 10)
    second.wait_for(2)
    first.send(signal.SIGCONT)
    statuses = wait_for_both(started)
    assert statuses == [0, 0], started[0].output + started[1].output
