"""The paper's sizes on a CPU: real steps of the real command, in memory that a workstation has."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import ROOT, numbers

from allattn.training.run_folder import RunFolder

VOCABULARY = 267_735
GIB = 2**30


@pytest.fixture
def zipf_text(tmp_path: Path) -> Path:
    """Every word of the vocabulary once, then Zipf-like frequencies."""
    command = [sys.executable, "tests/data/generate_zipf.py", str(tmp_path / "text")]
    sizes = ["--train", "400000", "--valid", "300", "--test", "200", "--words", str(VOCABULARY - 2)]
    subprocess.run([*command, *sizes], cwd=ROOT, check=True)
    return tmp_path / "text"


@pytest.mark.slow
def test_full_size_model_takes_two_steps_in_twelve_gib(
    tmp_path: Path, zipf_text: Path, record_property: Callable[[str, object], None]
) -> None:
    """L=16, d=512, H=8, N=2048, M=192: experiment=paper with 2 x 64 tokens a step."""
    folder = RunFolder(tmp_path / "runs" / "full")
    arguments = [
        "experiment=paper",
        "name=full",
        f"runs_folder={tmp_path}/runs",
        "data=files",
        f"data.folder={zipf_text}",
        f"data.cache_folder={tmp_path}/cache",
        "schedule.batch_size=2",
        "schedule.segment_length=64",
        "schedule.steps=2",
        "schedule.warmup_steps=1",
        "eval.rows=1",
        "trainer.accelerator=cpu",
        "trainer.log_interval=1",
        "trainer.progress=false",
        "logger=none",
    ]
    began = time.monotonic()
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    printed = (tmp_path / "output").read_text()
    assert os.waitstatus_to_exitcode(status) == 0, printed
    peak = usage.ru_maxrss * 1024
    record_property("peak_gib", peak / GIB)
    record_property("seconds", seconds)
    print(f"peak resident memory {peak / GIB:.2f} GiB, {seconds:.0f} s in all")
    assert peak < 12 * GIB
    losses = numbers(folder, "loss")
    assert len(losses) == 2
    assert all(5 < loss < 100 for loss in losses), losses
    assert losses[1] != losses[0]
    assert all(0 < norm < 1e4 for norm in numbers(folder, "gradient_norm"))
    assert f"{VOCABULARY:,}" in printed
    assert numbers(folder, "valid_loss")[0] < 100
