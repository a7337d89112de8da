"""Runs killed at random moments, or in the middle of a write, go on with bit-identical numbers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import KILLED, PATIENCE, ROOT, KillIn, last_step, rows, run, start
from support.sameness import assert_same, equal

from allattn.training.checkpoints import read_checkpoint, write_checkpoint
from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]
PRETRAIN = "schedule.steps=40"
ACCUMULATED = "trainer.accumulation=2"
FREEZE, STEPS = 12, 24  # of the pruning runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments) -> RunFolder:
    """The uninterrupted pretraining, with dropout."""
    base = tmp_path_factory.mktemp("whole")
    folder = RunFolder(base / "run")
    run(base / "output", "train.py", *pretraining(folder, PRETRAIN))
    return folder


@pytest.fixture(scope="module")
def whole_pruning(
    tmp_path_factory: pytest.TempPathFactory, pruning: Arguments, dense: RunFolder
) -> RunFolder:
    """The uninterrupted pruning run, with dropout, gate noise and accumulation."""
    base = tmp_path_factory.mktemp("whole_pruning")
    folder = RunFolder(base / "run")
    run(base / "output", "prune.py", *pruning(folder, dense.last, ACCUMULATED))
    return folder


def test_the_runs_exercise_what_they_should(whole: RunFolder, whole_pruning: RunFolder) -> None:
    """Otherwise the tests below could not fail: all steps logged, some heads closed, some kept."""
    assert [row["step"] for row in rows(whole)] == [str(step) for step in range(1, 41)]
    assert [row["step"] for row in rows(whole_pruning)] == [str(step) for step in range(1, STEPS + 1)]
    assert [row["phase"] for row in rows(whole_pruning)] == ["gates"] * FREEZE + ["fine_tune"] * FREEZE
    pruned = json.loads(whole_pruning.result.read_text())["pruned"]
    assert 0 < pruned["heads_kept_total"] < pruned["heads_total"]
    sampled = {row["sparsity_sampled"] for row in rows(whole_pruning)[:FREEZE]}
    assert len(sampled) > 2, "gate noise is on"


def test_another_seed_gives_other_numbers(tmp_path: Path, pretraining: Arguments, whole: RunFolder) -> None:
    """Dropout depends on the seed, so equal numbers mean equal random states."""
    folder = RunFolder(tmp_path / "run")
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN, "seed=2"))
    assert rows(folder) != rows(whole)


def is_writing(folder: RunFolder) -> bool:
    return any(folder.checkpoints.glob("last.ckpt.*.partial"))


def test_pretraining_killed_three_times(tmp_path: Path, pretraining: Arguments, whole: RunFolder) -> None:
    """From outside: mid-run, right after an evaluation, and while (or just after) a checkpoint is written."""
    rng = random.Random(0)
    folder = RunFolder(tmp_path / "run")
    middle, evaluated, writing = rng.randrange(6, 9), rng.choice([10, 20]), rng.randrange(26, 30)
    moments: list[Callable[[], bool]] = [
        lambda: last_step(folder) >= middle,
        lambda: last_step(folder) >= evaluated,
        lambda: last_step(folder) >= writing and (is_writing(folder) or last_step(folder) > 31),
    ]
    for moment in moments:
        started = start(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
        started.send_when(signal.SIGKILL, moment)
        assert started.wait() == KILLED
        assert not folder.result.exists(), "the run was not over"
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    assert_same(folder, whole)


def test_pruning_killed_three_times_across_the_freeze(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole_pruning: RunFolder
) -> None:
    rng = random.Random(1)
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
    before, after = rng.randrange(6, 11), rng.randrange(FREEZE + 1, STEPS - 4)
    moments: list[Callable[[], bool]] = [
        lambda: last_step(folder) >= before,
        lambda: folder.gates.exists() or last_step(folder) >= FREEZE,
        lambda: last_step(folder) >= after,
    ]
    for moment in moments:
        started = start(tmp_path / "output", "prune.py", *arguments)
        started.send_when(signal.SIGKILL, moment)
        assert started.wait() == KILLED
        assert not folder.result.exists(), "the run was not over"
    run(tmp_path / "output", "prune.py", *arguments)
    assert_same(folder, whole_pruning)


IN_PRETRAINING = [  # each start goes on from where the one before was killed; checkpoints come every 5 steps
    KillIn("allattn.stages.run:fit", 1),  # before the first step
    KillIn(
        "allattn.training.checkpoints:torch.save", 1, "middle"
    ),  # at step 5: there is no earlier checkpoint
    KillIn("allattn.training.language_task:LanguageTask.training_step", 13),
    KillIn("allattn.training.language_task:LanguageTask.on_before_optimizer_step", 3, "after"),
    KillIn("allattn.training.metrics:CsvMetrics.log_metrics", 10),  # at step 20: evaluated, not logged
    KillIn("allattn.training.scoring:score", 1),  # in the validation at step 20
    KillIn("allattn.training.metrics:CsvMetrics.log_metrics", 5, "after"),  # at step 20: logged, not saved
    KillIn("allattn.training.checkpoints:torch.save", 2, "middle"),  # at step 25
    KillIn("allattn.files:shutil.copyfileobj", 1, "after"),  # at an improvement, best.ckpt.partial
    KillIn("allattn.stages.run:Run.measure", 1),  # trained, not scored
    KillIn("allattn.training.run_folder:RunFolder.write_result", 1),
]


def test_pretraining_killed_inside_many_functions(
    tmp_path: Path, pretraining: Arguments, whole: RunFolder
) -> None:
    folder = RunFolder(tmp_path / "run")
    for moment in IN_PRETRAINING:
        run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN), kill_in=moment)
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    assert_same(folder, whole)


def test_killed_between_the_last_and_the_best_checkpoint(
    tmp_path: Path, pretraining: Arguments, whole: RunFolder
) -> None:
    """The last improvement of the run is saved in last.ckpt but not yet in best.ckpt."""
    folder = RunFolder(tmp_path / "run")
    saves = read_checkpoint(whole.best)["allattn"]["step"] // 5  # up to that improvement
    moment = KillIn("allattn.training.checkpoint_io:write_checkpoint", saves, "after")
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN), kill_in=moment)
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    assert_same(folder, whole)


IN_PRUNING = [
    KillIn("allattn.training.language_task:LanguageTask.training_step", 16),  # between the groups of a step
    KillIn("allattn.training.scoring:score", 1),
    KillIn("allattn.stages.prune:_remove_heads", 1),
    KillIn("allattn.stages.prune:write_checkpoint", 1, "after"),  # gates.ckpt is written, last.ckpt is uncut
    KillIn("allattn.stages.prune:write_checkpoint", 2, "after"),  # last.ckpt is cut
    KillIn("allattn.training.language_task:LanguageTask.training_step", 2),
    KillIn("allattn.stages.prune:_conclude", 1),
]


def test_pruning_killed_inside_many_functions(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole_pruning: RunFolder
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
    for moment in IN_PRUNING:
        run(tmp_path / "output", "prune.py", *arguments, kill_in=moment)
    run(tmp_path / "output", "prune.py", *arguments)
    assert_same(folder, whole_pruning)


@pytest.mark.parametrize("first_start", [True, False], ids=["first start", "resume"])
def test_killed_while_the_settings_are_written(
    tmp_path: Path, pretraining: Arguments, whole: RunFolder, first_start: bool
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pretraining(folder, PRETRAIN)
    if not first_start:
        moment = KillIn("allattn.training.language_task:LanguageTask.training_step", 13)
        run(tmp_path / "output", "train.py", *arguments, kill_in=moment)
    moment = KillIn("allattn.training.run_folder:Path.write_text", 1, "middle")
    started = start(tmp_path / "output", "train.py", *arguments, kill_in=moment)
    assert started.wait() in (KILLED, 0)  # 0: nothing was to be written, or in another way
    run(tmp_path / "output", "train.py", *arguments)
    assert_same(folder, whole)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP], ids=["SIGUSR1", "SIGHUP"])
def test_signal_saves_and_exits(
    tmp_path: Path, pretraining: Arguments, whole: RunFolder, number: signal.Signals
) -> None:
    folder = RunFolder(tmp_path / "run")
    started = start(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    started.send_when(number, lambda: last_step(folder) >= 12)
    assert started.wait() == 128 + number
    step = read_checkpoint(folder.last)["allattn"]["step"]
    assert step == last_step(folder) >= 12
    assert f"stopped by signal {int(number)} at step {step}" in started.output
    assert "Traceback" not in started.output
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    assert_same(folder, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_in_the_gate_phase(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole_pruning: RunFolder, number: signal.Signals
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
    started = start(tmp_path / "output", "prune.py", *arguments)
    started.send_when(number, lambda: last_step(folder) >= 7)
    assert started.wait() == 128 + number
    saved = read_checkpoint(folder.last)["allattn"]
    assert saved["step"] == last_step(folder) >= 7
    run(tmp_path / "output", "prune.py", *arguments)
    assert_same(folder, whole_pruning)


@pytest.mark.parametrize(("evaluation", "step"), [(2, FREEZE), (4, STEPS)], ids=["freeze", "end"])
def test_signal_while_the_last_step_of_a_phase_is_evaluated(
    tmp_path: Path,
    pruning: Arguments,
    dense: RunFolder,
    whole_pruning: RunFolder,
    evaluation: int,
    step: int,
) -> None:
    """Evaluations come after steps 10, 12 (the freeze), 20 and 24; the run stops between the phases."""
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
    moment = KillIn("allattn.training.scoring:score", evaluation, number=signal.SIGTERM)
    started = start(tmp_path / "output", "prune.py", *arguments, kill_in=moment)
    assert started.wait() == 128 + signal.SIGTERM, started.output
    assert read_checkpoint(folder.last)["allattn"]["step"] == step
    assert not folder.result.exists()
    run(tmp_path / "output", "prune.py", *arguments)
    assert_same(folder, whole_pruning)


def test_killed_while_a_big_checkpoint_is_written(tmp_path: Path, dense: RunFolder) -> None:
    """From outside, in a plain process: the earlier file is intact and loads; the next write succeeds."""
    path = tmp_path / "last.ckpt"
    shutil.copyfile(dense.last, path)
    checkpoint, before = read_checkpoint(path), path.read_bytes()
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from allattn.training.checkpoints import write_checkpoint\n"
        "write_checkpoint(Path(sys.argv[1]), {'state_dict': {'w': torch.ones(200_000_000)}})\n"
    )

    command = [sys.executable, "-c", program, str(path)]
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    partial = tmp_path / f"last.ckpt.{killed.pid}.partial"
    until = time.monotonic() + PATIENCE
    while not (partial.exists() and partial.stat().st_size > 8e6):
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.0005)
    killed.kill()
    assert killed.wait() == KILLED
    assert partial.stat().st_size < 8e8, "the write was not over"
    assert path.read_bytes() == before
    assert equal(read_checkpoint(path), checkpoint)
    write_checkpoint(path, checkpoint | {"global_step": 77})
    assert read_checkpoint(path)["global_step"] == 77
