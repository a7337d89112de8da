"""The package as others install it: from a wheel, in a folder where nothing of the repository lies."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from allattn.commands.command_line import COMMANDS

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
TINY = [
    "experiment=demo",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.progress=false",
    "eval.interval=0",
]
SIZES = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "persistent_vectors": 6,
    "memory_length": 8,
    "position_rows": 16,
}
SMALL = [
    f"model.{name}={size}" for name, size in (SIZES | {"vocabulary_size": 400, "cutoffs": [20, 60]}).items()
]
SMALL += ["batch_size=2", "segment_length=8", "heads=[2,0]"]
Allattn = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pip wheel .` of a copy, so that nothing of an earlier build gets in and none is left behind."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("allattn", "conf"):
        shutil.copytree(
            ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in BUILT_FROM:
        shutil.copy(ROOT / file, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", copy, copy], check=True)
    (built,) = copy.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def allattn(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Allattn:
    """The console script of the installed wheel, in an empty folder; its standard output."""
    installed, folder = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--target", installed, wheel], check=True)
    environment = os.environ | {"PYTHONPATH": str(installed), "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, installed / "bin" / "allattn", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_wheel_holds_every_module_and_every_setting(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("allattn/")}
    code = {path.relative_to(ROOT) for path in (ROOT / "allattn").rglob("*.py")}
    settings = {"allattn" / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    templates = {path.relative_to(ROOT) for path in (ROOT / "allattn").rglob("*.jinja")}
    assert {str(path) for path in code | settings | templates} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_every_command_runs_in_an_empty_folder(allattn: Allattn) -> None:
    last = "checkpoint=runs/{}/checkpoints/last.ckpt"
    overview = allattn()
    assert str(ROOT) not in allattn("train", "--info", "searchpath"), "its settings are the wheel's own"
    trained = allattn("train", *TINY, "schedule.steps=4", "schedule.warmup_steps=2")
    gates = ["gates.freeze_step=2", "gates.lambda_warmup_steps=1"]
    pruned = allattn("prune", *TINY, last.format("demo"), "schedule.steps=4", *gates)
    printed = {
        "prepare": allattn("prepare", "data=pydoc"),
        "train": trained,
        "prune": pruned,
        "evaluate": allattn("evaluate", last.format("demo-pruned"), "split=valid"),
        "generate": allattn("generate", last.format("demo"), "prompt=The", "length=2"),
        "heads": allattn("heads", last.format("demo-pruned"), "picture=heads.png"),
        "export": allattn("export", last.format("demo-pruned"), "folder=exported"),
        "study": allattn("study", last.format("demo"), "score=ahon_ln", "share=0.25", "random_seeds=1"),
        "compare": allattn("compare"),
        "memory": allattn("memory", "model.layers=2", "accumulation=[96]"),
        "benchmark": allattn("benchmark", *SMALL, "squares=[16]", "repeats=1", "peak_memory=false"),
    }
    of_extras = {"lm-eval", "remove"}  # see tests/huggingface and tests/commands/test_remove_command.py
    assert printed.keys() == COMMANDS.keys() - of_extras
    for name, output in printed.items():
        assert output.strip(), name
        assert f"  {name} " in overview
