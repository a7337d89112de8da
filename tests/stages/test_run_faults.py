"""Numbers that are not finite, damaged records of a run, and folders that are no run's."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.settings import plain
from allattn.training import language_task
from allattn.training.between_steps import MOST_SKIPPED, BetweenSteps
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import OptimizerName
from allattn.training.language_task import LanguageTask
from allattn.training.metrics import CsvMetrics, read_metrics
from allattn.training.optimizers import clip_gradients
from allattn.training.run_folder import RunFolder, open_run_folder
from allattn.training.scoring import Score
from allattn.training.signals import StopSignals

Rows = Callable[[RunFolder], list[dict[str, str]]]


def all_finite(path: Path) -> bool:
    return all(t.isfinite().all() for t in read_checkpoint(path)["state_dict"].values())


@pytest.mark.parametrize(
    ("name", "value"),
    [(OptimizerName.lamb, math.inf), (OptimizerName.adamw, math.nan), (OptimizerName.muon, -math.inf)],
)
def test_gradient_that_is_not_finite(
    runs: Any, monkeypatch: pytest.MonkeyPatch, rows: Rows, value: float, name: OptimizerName
) -> None:
    """In step 6, which is saved otherwise: named, stopped, and the checkpoint of step 4 is the last one."""
    changes = {"optimizer__name": name, "trainer__checkpoint_interval": 2, "eval__interval": 2}
    settings = runs.pretraining("run", **changes)
    calls = []

    def spoilt(parameters: list[torch.nn.Parameter], largest: float) -> torch.Tensor:
        calls.append(largest)
        if len(calls) == 6:
            assert parameters[0].grad is not None
            parameters[0].grad.view(-1)[0] = value
        return clip_gradients(parameters, largest)

    with monkeypatch.context() as patch:
        patch.setattr(language_task, "clip_gradients", spoilt)
        with pytest.raises(InputError, match=r"the gradient is not finite at step 6 .*last\.ckpt") as error:
            runs.run(settings)
    assert "\n" not in str(error.value)
    folder = runs.at(settings)
    for path in (folder.last, folder.best):
        assert read_checkpoint(path)["allattn"]["step"] <= 4
        assert all_finite(path)
    assert read_checkpoint(folder.last)["allattn"]["step"] == 4
    assert not folder.result.exists()
    whole = runs.run(runs.pretraining("whole", **changes))
    assert rows(runs.run(settings)) == rows(whole), "from there it goes on as if nothing had happened"


class Fp16:
    """What a step's check asks a trainer."""

    precision = "16-mixed"


def test_fp16_may_skip_some_updates(tmp_path: Path) -> None:
    """The loss scale is being found; a gradient that stays infinite is named all the same."""
    between = BetweenSteps(StopSignals(), RunFolder(tmp_path), lambda task: Score(1.0, 1), 1, 1, 1, 1, 1)

    class Task:
        def __init__(self, norm: float, loss: float = 1.0) -> None:
            self.last = {"loss": torch.tensor(loss), "gradient_norm": torch.tensor(norm), "learning_rate": 1}

    def check(norm: float, loss: float = 1.0) -> None:
        between._check_finite(cast(Any, Fp16), cast(Any, Task(norm, loss)), 9)

    for _ in range(2):
        for _ in range(MOST_SKIPPED):
            check(math.inf)
        check(1.0)
    for _ in range(MOST_SKIPPED):
        check(math.nan)
    with pytest.raises(InputError, match="the gradient is not finite at step 9"):
        check(math.inf)
    with pytest.raises(InputError, match="the loss is not finite at step 9"):
        check(1.0, math.nan)


def test_update_that_spoils_a_weight_is_not_saved(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient are finite, and yet a weight is not after step 5."""
    step = LanguageTask.optimizer_step

    def spoilt(self: LanguageTask, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        if self.global_step == 4:
            self.model.layers[1].bias.data[0] = math.inf

    monkeypatch.setattr(LanguageTask, "optimizer_step", spoilt)
    settings = runs.pretraining("run", trainer__checkpoint_interval=1)
    with pytest.raises(InputError, match=r"the weight model\.layers\.1\.bias is not finite at step 5"):
        runs.run(settings)
    assert read_checkpoint(runs.at(settings).last)["allattn"]["step"] == 4
    assert all_finite(runs.at(settings).last)


def test_nan_in_the_data_path(runs: Any, monkeypatch: pytest.MonkeyPatch, dense_run: RunFolder) -> None:
    """An embedding row of one word turns NaN: the first step that reads the word is the last."""
    forward = AllAttentionLM.forward

    def spoilt(self: AllAttentionLM, ids: torch.Tensor, *args: Any, **known: Any) -> Any:
        nats, memory = forward(self, ids, *args, **known)
        return torch.where(ids == 7, torch.nan, nats), memory

    monkeypatch.setattr(AllAttentionLM, "forward", spoilt)
    settings = runs.pruning("run", dense_run.last)
    with pytest.raises(InputError, match=r"the loss is not finite at step \d+"):
        runs.run(settings)
    assert not runs.at(settings).result.exists()
    assert not list(runs.at(settings).checkpoints.glob("*.ckpt")) or all_finite(runs.at(settings).last)


@pytest.fixture
def finished(runs: Any, dense_run: RunFolder) -> tuple[Any, RunFolder]:
    """Settings and a copy of a finished run."""
    settings = runs.pretraining("dense")
    with open_run_folder(runs.at(settings).path, plain(settings), False) as folder:
        for path in (dense_run.result, dense_run.metrics):
            shutil.copyfile(path, folder.path / path.name)
        for path in dense_run.checkpoints.iterdir():
            shutil.copyfile(path, folder.checkpoints / path.name)
    return settings, folder


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b'{"dense": {"test": 3}}', b"\xff\xfe\x00", b"[" * 100_000]
)
def test_damaged_result(finished: tuple[Any, RunFolder], runs: Any, content: bytes) -> None:
    settings, folder = finished
    good = folder.finished()
    folder.result.write_bytes(content)
    with pytest.raises(InputError, match=r"result\.json: is damaged; remove it") as error:
        runs.run(settings)
    assert "\n" not in str(error.value)
    assert folder.result.read_bytes() == content
    folder.result.unlink()
    again = runs.run(settings).finished()
    assert again is not None
    assert good is not None
    for result in (again, good):
        del result["dense"]["layer_microseconds_per_token"]  # measured anew
    assert again["dense"] == good["dense"], "what the message says is so"


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00binary\n", b"loss,step\n1.0,x\n", b"loss\n1.0\n", b"step\n-3\n", b"step\n1\0\n\n2\n"],
)
def test_damaged_metrics(runs: Any, stop: Any, content: bytes) -> None:
    settings = runs.pretraining("run")
    stop.by_signal(lambda: runs.run(settings), 4)
    folder = runs.at(settings)
    folder.metrics.write_bytes(content)
    saved = folder.last.read_bytes()
    with pytest.raises(InputError, match=r"metrics\.csv: is damaged; move it away") as error:
        runs.run(settings)
    assert "\n" not in str(error.value)
    assert folder.metrics.read_bytes() == content
    assert folder.last.read_bytes() == saved
    folder.metrics.unlink()
    runs.run(settings)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [str(step) for step in range(5, 11)]


def test_metrics_cut_at_any_byte(tmp_path: Path) -> None:
    """A write that was interrupted anywhere: whole rows are read, and never a wrong number."""
    path = tmp_path / "metrics.csv"
    log = CsvMetrics(path)
    for step in range(8, 12):
        log.log_metrics({"loss": step / 8, "phase": "gates"}, step)
    whole, wanted = path.read_bytes(), read_metrics(path)
    assert len(wanted) == 4
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = read_metrics(path)
        assert found == wanted[: len(found)]
        assert len(found) >= whole[:cut].count(b"\n") - 1


def test_folder_that_is_no_runs(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(InputError, match=r"is no run's folder, it holds thesis\.tex"),
        open_run_folder(tmp_path, {"seed": 1}, True),
    ):
        pass
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["thesis.tex"]


def test_what_a_killed_start_leaves_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    leftovers = [
        tmp_path / "config.yaml.77.partial",
        tmp_path / "checkpoints" / "last.ckpt.77.partial",
        tmp_path / "checkpoints" / "tokenizer.json.77.partial",
    ]
    for path in leftovers:
        path.write_text("half")
    with open_run_folder(tmp_path, {"seed": 1}, False):
        assert not any(path.exists() for path in leftovers)
