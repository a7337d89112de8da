"""A run, its text or its dense checkpoint lies elsewhere now: what they hold counts, not their names."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import start

from allattn.data.config import DataConfig
from allattn.errors import InputError
from allattn.training.run_folder import RunFolder

Rows = Callable[[RunFolder], list[dict[str, str]]]


@pytest.fixture
def text(data: DataConfig, tmp_path: Path) -> Path:
    """A text of the test's own."""
    assert data.folder is not None
    return Path(shutil.copytree(data.folder, tmp_path / "text", ignore=shutil.ignore_patterns("cache")))


@pytest.fixture
def reading(runs: Any, text: Path) -> Callable[..., Any]:
    """Settings of a run on the text, which is named as given."""

    def settings(folder: str | Path, **changes: Any) -> Any:
        own = runs.pretraining("run", **changes)
        own.data = replace(own.data, folder=str(folder))
        return own

    return settings


def test_a_text_goes_by_its_content(
    runs: Any,
    stop: Any,
    rows: Rows,
    reading: Callable[..., Any],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = runs.run(runs.pretraining("whole"))
    stop.by_signal(lambda: runs.run(reading(text)), 3)
    monkeypatch.chdir(text.parent)
    stop.by_signal(lambda: runs.run(reading("text/")), 5)
    text.rename(text.with_name("elsewhere"))
    folder = runs.run(reading("./elsewhere"))
    assert rows(folder) == rows(whole)
    assert yaml.safe_load(folder.config.read_text())["data"]["folder"] == "./elsewhere"
    capsys.readouterr()
    runs.run(reading(text.with_name("elsewhere")))
    assert "is finished: test perplexity" in capsys.readouterr().out


def test_another_text_is_refused_under_any_name(
    runs: Any, stop: Any, reading: Callable[..., Any], text: Path
) -> None:
    stop.by_signal(lambda: runs.run(reading(text)), 3)
    folder = runs.at(reading(text))
    before = folder.config.read_bytes()
    other = Path(shutil.copytree(text, text.with_name("other")))
    with (other / "wiki.test.tokens").open("a") as file:
        file.write("w1 w2\n")
    refusal = rf"last\.ckpt: belongs to another text \(data\.folder: {text} -> {other}\)"
    with pytest.raises(InputError, match=refusal):
        runs.run(reading(other))
    rarer = reading(text)
    rarer.data.minimum_count = 9
    with pytest.raises(InputError, match=r"belongs to another vocabulary \(data\.minimum_count: 1 -> 9\)"):
        runs.run(rarer)
    assert folder.config.read_bytes() == before
    runs.run(reading(text))
    with pytest.raises(InputError, match=refusal.replace(r"last\.ckpt", r"result\.json")):
        runs.run(reading(other))
    assert folder.config.read_bytes() == before


def test_a_run_goes_on_under_another_name(runs: Any, stop: Any, rows: Rows) -> None:
    whole = runs.run(runs.pretraining("whole"))
    settings = runs.pretraining("old")
    stop.by_signal(lambda: runs.run(settings), 3)
    (runs.folder / "group").mkdir()
    runs.at(settings).path.rename(runs.folder / "group" / "new")
    assert rows(runs.run(runs.pretraining("./group/new"))) == rows(whole)


def test_a_dense_checkpoint_goes_by_its_content(
    runs: Any, stop: Any, rows: Rows, dense_run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = runs.run(runs.pruning("whole", dense_run.last))
    stop.by_signal(lambda: runs.run(runs.pruning("run", dense_run.last)), 3)
    moved = Path(shutil.copytree(dense_run.checkpoints, tmp_path / "moved")) / dense_run.last.name
    assert rows(runs.run(runs.pruning("run", moved))) == rows(whole)
    capsys.readouterr()
    runs.run(runs.pruning("run", dense_run.last))
    assert "is finished: test perplexity" in capsys.readouterr().out


def test_what_evaluate_advises_works(
    runs: Any, reading: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    checkpoint = runs.run(reading(text, schedule__steps=2, schedule__warmup_steps=0)).last
    moved = text.rename(text.with_name("moved"))
    command = ("allattn", "evaluate", f"checkpoint={checkpoint}", f"data.cache_folder={tmp_path}/cache")
    lost = start(tmp_path / "lost", *command)
    assert lost.wait() == 2
    assert f"error: {text}: the text that the checkpoint was trained on is no longer there" in lost.output
    advice = "data.source=files data.folder="
    assert f"{advice}FOLDER" in lost.output
    found = start(tmp_path / "found", *command, *f"{advice}{moved}".split())
    assert found.wait() == 0, found.output
    assert "perplexity" in found.output
