"""A run that is killed or interrupted, at any moment, and started again gives the uninterrupted run's numbers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder
from commands import KILLED, ROOT, KillIn, last_step, rows, run, start

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


def equal(one: Any, other: Any) -> bool:
    """Bit-identical, however deep the tensors are."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def assert_same(folder: RunFolder, expected: RunFolder) -> None:
    """Every logged number, the weights, the optimizer, the memory and the scores are bit-identical."""
    assert rows(folder) == rows(expected)
    for name in ("last", "best", "gates"):
        path, wanted = getattr(folder, name), getattr(expected, name)
        assert path.exists() == wanted.exists()
        if wanted.exists():
            ours, theirs = read_checkpoint(path), read_checkpoint(wanted)
            for part in ("state_dict", "optimizer_states", "allattn"):
                assert equal(ours[part], theirs[part]), f"{name}: {part}"
    results = [json.loads(f.result.read_text()) for f in (folder, expected)]
    for stage in ("dense", "pruned"):
        both = [result.get(stage) for result in results]
        for split in ("valid", "test"):
            assert [record and record[split] for record in both][0] == (both[1] and both[1][split])
    assert not list(folder.path.rglob("*.partial")), "nothing half-written is left"


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


def test_pretraining_killed_three_times(tmp_path: Path, pretraining: Arguments, whole: RunFolder) -> None:
    """From outside: mid-run, right after an evaluation, and while (or just after) a checkpoint is written."""
    rng = random.Random(0)
    folder = RunFolder(tmp_path / "run")
    partial = folder.last.with_name("last.ckpt.partial")
    middle, evaluated, writing = rng.randrange(6, 9), rng.choice([10, 20]), rng.randrange(26, 30)
    moments: list[Callable[[], bool]] = [
        lambda: last_step(folder) >= middle,
        lambda: last_step(folder) >= evaluated,
        lambda: last_step(folder) >= writing and partial.exists(),
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


IN_PRETRAINING = [
    KillIn("allattn.stages:_fit", 1),  # before the first step
    KillIn("allattn.training.language_task:LanguageTask.training_step", 13),
    KillIn("allattn.training.language_task:LanguageTask.on_before_optimizer_step", 13, "after"),
    KillIn("allattn.training.scoring:score", 2),  # in the validation at step 20
    KillIn("allattn.training.metrics:CsvMetrics.log_metrics", 20),  # evaluated, not logged
    KillIn("allattn.training.metrics:CsvMetrics.log_metrics", 20, "after"),  # logged, not saved
    KillIn("allattn.training.checkpoints:torch.save", 1, "middle"),  # there is no earlier checkpoint
    KillIn("allattn.training.checkpoints:torch.save", 4, "middle"),
    KillIn("allattn.training.checkpoints:write_atomically", 4, "after"),  # best.ckpt is older
    KillIn("allattn.training.progress:shutil.copyfile", 2, "after"),  # best.ckpt.partial is there
    KillIn("allattn.stages:_conclude_pretrain", 1),  # trained, not scored
    KillIn("allattn.training.run_folder:RunFolder.write_result", 1),
]


@pytest.mark.parametrize("moment", IN_PRETRAINING, ids=str)
def test_pretraining_killed_inside(
    tmp_path: Path, pretraining: Arguments, whole: RunFolder, moment: KillIn
) -> None:
    folder = RunFolder(tmp_path / "run")
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN), kill_in=moment)
    run(tmp_path / "output", "train.py", *pretraining(folder, PRETRAIN))
    assert_same(folder, whole)


IN_PRUNING = [
    KillIn("allattn.training.language_task:LanguageTask.training_step", 16),  # between the groups of a step
    KillIn("allattn.training.scoring:score", 1),
    KillIn("allattn.stages:_remove_heads", 1),
    KillIn("allattn.stages:write_atomically", 1, "after"),  # gates.ckpt is written, last.ckpt is uncut
    KillIn("allattn.stages:write_atomically", 2, "after"),  # last.ckpt is cut
    KillIn("allattn.training.language_task:LanguageTask.training_step", 2 * FREEZE + 2),
]


@pytest.mark.parametrize("moment", IN_PRUNING, ids=str)
def test_pruning_killed_inside(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole_pruning: RunFolder, moment: KillIn
) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
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


@pytest.mark.parametrize("phase", ["gates", "fine_tune"])
def test_signal_in_the_last_step_of_a_phase_stops_too(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole_pruning: RunFolder, phase: str
) -> None:
    """The signal comes while the phase's last step is evaluated: nothing is lost, nothing is repeated."""
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, ACCUMULATED)
    started = start(tmp_path / "output", "prune.py", *arguments)
    last = FREEZE if phase == "gates" else STEPS
    started.send_when(signal.SIGTERM, lambda: last_step(folder) >= last - 1)
    status = started.wait()
    assert status in (128 + signal.SIGTERM, -signal.SIGTERM, 0), started.output  # after the last step: no matter
    run(tmp_path / "output", "prune.py", *arguments)
    assert_same(folder, whole_pruning)


def test_killed_while_a_big_checkpoint_is_written(tmp_path: Path) -> None:
    """From outside, in a plain process: the earlier file is intact and loads; the next write succeeds."""
    path = tmp_path / "last.ckpt"
    partial = tmp_path / "last.ckpt.partial"
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from allattn.training.checkpoints import write_atomically\n"
        "value, millions = float(sys.argv[2]), int(sys.argv[3])\n"
        "content = {'state_dict': {'w': torch.full((millions, 1_000_000), value)},"
        " 'allattn': {'format_version': 1}}\n"
        "write_atomically(content, Path(sys.argv[1]))\n"
    )

    def write(value: int, millions: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(path), str(value), str(millions)]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})

    assert write(1, 2).wait() == 0
    before = path.read_bytes()
    killed = write(2, 200)  # 800 MB
    until = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 8e6):
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.0005)
    killed.kill()
    assert killed.wait() == KILLED
    assert partial.stat().st_size < 8e8, "the write was not over"
    assert path.read_bytes() == before
    assert (read_checkpoint(path)["state_dict"]["w"] == 1).all()
    assert write(3, 2).wait() == 0
    assert (read_checkpoint(path)["state_dict"]["w"] == 3).all()
    assert not partial.exists()
