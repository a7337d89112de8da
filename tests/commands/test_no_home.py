"""A user without HOME and without an entry in passwd, as a container may run one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from allattn.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
NOBODY = """
import os, pwd
def unknown(user):
    raise KeyError(user)
pwd.getpwuid = unknown
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
from allattn.commands.command_line import main
main()
"""


def as_nobody(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NOBODY, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_run_needs_the_cache_folder_alone(pretraining: Callable[..., list[str]], tmp_path: Path) -> None:
    """W&B's offline files and matplotlib's font cache included."""
    folder = RunFolder(tmp_path / "runs" / "homeless")
    few = ("schedule.steps=4", "schedule.warmup_steps=2", "logger=offline")
    done = as_nobody(tmp_path, "train", *pretraining(folder, *few))
    assert done.returncode == 0, done.stderr
    assert folder.result.exists()
    drawn = as_nobody(tmp_path, "heads", f"checkpoint={folder.last}", "picture=heads.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "heads.png").exists()
