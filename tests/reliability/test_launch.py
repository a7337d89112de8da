"""Runs as schedulers and launchers start them: Slurm steps, submitit, a multirun on two devices."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import PATIENCE, ROOT, last_step, numbers, run, start, wait_for_both
from support.sameness import assert_same

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]
TWO = ("trainer.devices=2", "trainer.strategy=ddp")
RARELY = ("schedule.steps=200", "eval.interval=100000", "trainer.checkpoint_interval=100000")


def step_variables(task: int, tasks: int) -> dict[str, str]:
    """What srun tells the processes that it starts on one node."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "train",
    }


def test_four_trainings_in_one_slurm_step_are_four_runs(tmp_path: Path, pretraining: Arguments) -> None:
    folders = [RunFolder(tmp_path / f"run{task}") for task in range(4)]
    started = [
        start(
            tmp_path / f"output{task}",
            "train.py",
            *pretraining(folder, "schedule.steps=5", f"seed={task}"),
            environment=step_variables(task, 4),
        )
        for task, folder in enumerate(folders)
    ]
    assert [one.wait() for one in started] == [0, 0, 0, 0], [one.output for one in started]
    for one, folder in zip(started, folders, strict=True):
        for path in (folder.config, folder.result, folder.tokenizer, folder.last):
            assert path.is_file()
        assert "perplexity" in one.output
    assert len({tuple(numbers(folder, "loss")) for folder in folders}) == 4


def test_two_tasks_of_a_slurm_step_are_one_run_on_two_devices(tmp_path: Path, pretraining: Arguments) -> None:
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    run(tmp_path / "output", "train.py", *pretraining(one, "schedule.steps=5", dropout=0.0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = {"MASTER_PORT": str(free.getsockname()[1])}
    arguments = pretraining(two, "schedule.steps=5", *TWO, dropout=0.0)
    started = [
        start(tmp_path / f"output{task}", "train.py", *arguments, environment=step_variables(task, 2) | port)
        for task in range(2)
    ]
    assert wait_for_both(started) == [0, 0], [each.output for each in started]
    assert numbers(two, "loss") == pytest.approx(numbers(one, "loss"), rel=1e-5)


def test_a_launchers_other_number_of_processes_is_refused(tmp_path: Path, pretraining: Arguments) -> None:
    """Four processes of torchrun and settings for one: each would take the run for its own."""
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "1"}
    folder = RunFolder(tmp_path / "run")
    started = start(tmp_path / "output", "train.py", *pretraining(folder), environment=launched)
    assert started.wait() == 2
    (line,) = started.output.splitlines()
    assert line.startswith("error: a launcher started 4 processes")
    assert "trainer.devices=1" in line
    assert not folder.path.exists()


def test_each_job_of_a_multirun_starts_its_own_second_process(tmp_path: Path, pretraining: Arguments) -> None:
    """From the console script, whose first argument names the command."""
    script = tmp_path / "allattn"  # as an installation makes it
    script.write_text("from allattn.commands.command_line import main\nmain()\n")
    folder = RunFolder(tmp_path / "sweep")
    arguments = pretraining(folder, "schedule.steps=5", *TWO, "seed=1,2", f"hydra.sweep.dir={tmp_path}/hydra")
    done = subprocess.run(
        [sys.executable, script, "train", "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        assert len(numbers(RunFolder(folder.path / f"seed-{seed}"), "loss")) == 5


def test_a_preempted_job_of_submitit_saves_is_queued_again_and_goes_on(
    tmp_path: Path, pretraining: Arguments
) -> None:
    """The launcher's local kind, which handles signals and queues again as that of Slurm does."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra slurm is not installed")
    whole = RunFolder(tmp_path / "whole" / "seed-3")
    run(tmp_path / "output", "train.py", *pretraining(whole, *RARELY, "seed=3"))
    sweep = tmp_path / "hydra"
    arguments = pretraining(
        RunFolder(tmp_path / "sweep"),
        *RARELY,
        "seed=3",
        "hydra/launcher=submitit_local",
        "hydra.launcher.timeout_min=60",
        f"hydra.sweep.dir={sweep}",
    )
    # Given as a list of one, so that the job's folder bears its seed.
    arguments[arguments.index("seed=3")] = "seed=choice(3)"
    folder = RunFolder(tmp_path / "sweep" / "seed-3")
    launcher = start(tmp_path / "launcher", "train.py", "-m", *arguments)
    until = time.monotonic() + PATIENCE
    while last_step(folder) < 5:
        assert launcher.running, launcher.output
        assert time.monotonic() < until, launcher.output
        time.sleep(0.01)
    (controller,) = (int(path.name) for path in sweep.glob(".submitit/*") if path.name.isdigit())
    (task,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)  # what Slurm sends before the time limit and at a preemption
    assert launcher.wait() == 0, launcher.output
    logs = "".join(path.read_text() for path in sweep.glob(f".submitit/{controller}/*_log.*"))
    stopped = re.search(rf"stopped by signal {int(signal.SIGUSR2)} at step (\d+) and saved", logs)
    assert stopped is not None, logs
    assert 5 <= int(stopped.group(1)) < 200
    assert "Requeued job" in logs
    assert read_checkpoint(folder.last)["allattn"]["step"] == 200
    assert_same(folder, whole)
