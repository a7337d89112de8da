"""Bad input at the command line: one line, exit status 2, nothing written over."""

from pathlib import Path

import pytest
from support.processes import start


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with three small splits."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text("a b c \n" * 200)
    return folder


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing folder", ["nowhere", "no such folder"]),
        ("empty split", ["wiki.valid.tokens", "empty"]),
        ("other encoding", ["wiki.test.tokens", "UTF-8"]),
        ("no checkpoint", ["notes.ckpt", "not a checkpoint"]),
        ("missing checkpoint", ["none.ckpt", "no such checkpoint"]),
        ("head count", ["model.width=64", "model.heads=7"]),
        ("misspelt setting", ["schedule.step", "schedule.steps"]),
    ],
)
def test_one_line_and_status_2(case: str, words: list[str], texts: Path, tmp_path: Path) -> None:
    common = [
        "experiment=demo",
        "logger=none",
        f"runs_folder={tmp_path}/runs",
        f"data.cache_folder={tmp_path}/c",
    ]
    script, settings = "train.py", ["data=files", f"data.folder={texts}"]
    if case == "missing folder":
        settings[1] = "data.folder=nowhere"
    elif case == "empty split":
        (texts / "wiki.valid.tokens").write_text("")
    elif case == "other encoding":
        (texts / "wiki.test.tokens").write_bytes("größer \n".encode("latin-1"))
    elif case == "no checkpoint":
        (tmp_path / "notes.ckpt").write_text("not a checkpoint at all")
        script, settings = "prune.py", [f"checkpoint={tmp_path}/notes.ckpt"]
    elif case == "missing checkpoint":
        script, settings = "prune.py", [f"checkpoint={tmp_path}/none.ckpt"]
    elif case == "head count":
        settings.append("model.heads=7")
    else:
        settings.append("schedule.step=3")
    before = {path: path.read_bytes() for path in texts.iterdir()}
    done = start(tmp_path / "output", script, *common, *settings)
    assert done.wait() == 2, done.output
    (line,) = done.output.splitlines()  # of standard output and standard error together
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert {path: path.read_bytes() for path in texts.iterdir()} == before
    assert not list(tmp_path.rglob("*.partial*"))
    assert not list((tmp_path / "runs").rglob("*.ckpt"))
