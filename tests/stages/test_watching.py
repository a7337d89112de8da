"""What a run tells while it trains: bar, measured columns, heads, and what to do without memory."""

import io
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.processes import last_step, start

from allattn.commands.evaluate import EvaluateSettings, Split, evaluate
from allattn.data.config import DataConfig
from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.training import display
from allattn.training.config import OptimizerConfig, OptimizerName
from allattn.training.display import StepBar
from allattn.training.metrics import read_metrics
from allattn.training.optimizers import make_optimizer
from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]


def test_the_bar_fits_into_eighty_columns_with_loss_perplexity_speed_and_time(
    runs: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    folder = runs.run(runs.pretraining("bar", schedule__steps=3, trainer__progress=True))
    row = read_metrics(folder.metrics)[-1]
    shown = capsys.readouterr().err
    assert "pretrain" in shown
    assert "3/3" in shown
    assert f"loss {float(row['loss']):.3f}" in shown
    assert f"ppl {float(row['perplexity']):.1f}" in shown
    assert "tok/s" in shown
    assert "…" not in shown
    assert shown.count("0:00:0") >= 2, "time taken and time left"


@pytest.mark.parametrize("perplexity", ["24.9", "12345.6", "6.9e+37"])
def test_the_papers_run_fits_into_eighty_columns(perplexity: str) -> None:
    bar = StepBar(0, 56_000)
    shown = f"loss 10.214  ppl {perplexity}  250,123 tok/s"
    bar.columns.update(bar.task, completed=10_000, shown=shown, description="fine_tune")
    screen = Console(width=80, file=io.StringIO())
    screen.print(bar.columns.get_renderable())
    line = screen.file.getvalue()  # type: ignore[attr-defined]
    assert line.startswith("fine_tune ")
    assert f"10000/56000 {shown} 0:00:00 -:--:--\n" in line


def test_without_a_terminal_there_is_a_line_every_log_interval(
    runs: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training and, more seldom, of scoring; with progress=false neither."""
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    changes = {"trainer__log_interval": 3, "schedule__steps": 7}
    folder = runs.run(runs.pretraining("lines", trainer__progress=True, **changes))
    lines = capsys.readouterr().err.splitlines()
    logged = {row["step"]: row for row in read_metrics(folder.metrics) if "loss" in row}
    assert list(logged) == ["3", "6", "7"]
    form = r"pretrain (\d+)/7  loss (\S+)  ppl (\S+)  [\d,]+ tok/s  0:00:\d\d left"
    trained = [found.groups() for line in lines if (found := re.fullmatch(form, line))]
    assert trained == [
        (step, f"{float(row['loss']):.3f}", f"{float(row['perplexity']):.1f}") for step, row in logged.items()
    ]
    assert "scoring 1/" in "\n".join(lines)
    runs.run(runs.pretraining("silent", **changes))
    assert "loss" not in capsys.readouterr().err


def test_lines_reach_a_file_while_the_run_goes_on(tmp_path: Path, pretraining: Arguments) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pretraining(folder, "schedule.steps=100000", "trainer.progress=true")
    started = start(tmp_path / "output", "train.py", *arguments)
    started.send_when(
        signal.SIGTERM, lambda: last_step(folder) >= 3 and "pretrain 2/100000  loss " in started.output
    )
    assert started.wait() == 143, started.output


def test_speed_and_memory_are_logged(runs: Any) -> None:
    for row in read_metrics(runs.run(runs.pretraining("measured", schedule__steps=3)).metrics):
        assert 0 < float(row["tokens_per_second"]) < 1e7
        assert 0.05 < float(row["peak_memory_gib"]) < 100
        assert int(row["tokens_seen"]) == 24 * int(row["step"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 1")])
def test_without_memory_the_settings_to_change_are_named(
    runs: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: AllAttentionLM, *args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(AllAttentionLM, "forward", full)
    with pytest.raises(InputError, match="out of memory at step 0") as refusal:
        runs.run(runs.pretraining("full"))
    for setting in ("trainer.accumulation=1", "schedule.batch_size=4", "schedule.segment_length=6"):
        assert setting in str(refusal.value)


def test_other_errors_are_not_taken_for_lack_of_memory(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: AllAttentionLM, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(AllAttentionLM, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        runs.run(runs.pretraining("broken"))


def test_scoring_in_the_gate_phase_uses_the_decided_heads_and_names_them(
    runs: Any, dense_run: RunFolder, uneven_gates: list[list[int]], data: DataConfig
) -> None:
    """The score at the freeze is that of the model whose closed heads are gone."""
    settings = runs.pruning("gates", dense_run.last, gates__learning_rate_ratio=1e-6)
    folder = runs.run(settings)
    named = {row["step"]: row["valid_heads"] for row in read_metrics(folder.metrics) if "valid_heads" in row}
    assert named == {"4": "0 2 3 | 1", "5": "0 2 3 | 1"}, uneven_gates
    at_the_freeze = float(read_metrics(folder.metrics)[4]["valid_loss"])
    found = evaluate(EvaluateSettings(str(folder.gates), split=Split.valid, data=data, eval=settings.eval))
    assert at_the_freeze == pytest.approx(found["nats_per_token"], rel=1e-5)
    dense = evaluate(EvaluateSettings(str(dense_run.last), split=Split.valid, data=data, eval=settings.eval))
    assert abs(at_the_freeze - dense["nats_per_token"]) > 1e-3, "the heads matter"


def test_adamw_is_fused_unless_gradients_must_be_unscaled_first() -> None:
    for fused in (True, False):
        weight = torch.nn.Parameter(torch.ones(2))
        group = {"name": "vectors", "params": [("w", weight)], "weight_decay": 0.0}
        optimizer = make_optimizer([group], OptimizerConfig(OptimizerName.adamw), fused)
        assert optimizer.param_groups[0]["fused"] is fused
