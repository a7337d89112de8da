"""Which accumulation fits a GPU, by calculation, and what a run makes of trainer.accumulation=0."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.training import fitting
from allattn.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
    TrainerConfig,
    check_training,
)
from allattn.training.fitting import GIB, Groups, fitting_groups, in_groups, training_bytes
from allattn.training.runner import training_groups
from allattn.training.step_memory import step_memory

SMALL = ModelConfig(vocabulary_size=500, layers=5, width=32, heads=2, persistent_vectors=64, cutoffs=[100])
ROWS, TOKENS = 12, 32
HOW = ("plain", "bf16-mixed", OptimizerName.lamb)


def test_layers_are_calculated_from_two() -> None:
    core, precision, optimizer = HOW
    whole = step_memory(SMALL, ROWS, TOKENS, core, precision, optimizer, keep_buffers=False)
    assert training_bytes(SMALL, ROWS, TOKENS, *HOW) == pytest.approx(whole.total, rel=0.01)


def test_groups_are_calculated_from_all_streams_and_one() -> None:
    whole, third, single = (training_bytes(SMALL, rows, TOKENS, *HOW) for rows in (ROWS, ROWS // 3, 1))
    assert whole > 2 * third > 4 * single
    assert in_groups(ROWS, whole, single)(3) == pytest.approx(third, rel=0.02)


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes a GiB, and another for each stream."""
    monkeypatch.setattr(fitting, "training_bytes", lambda config, rows, *how: (1 + rows) * GIB)


@pytest.mark.parametrize(("gib", "groups"), [(15.6, 1), (15.5, 2), (6.7, 3), (6.6, 4), (3.4, 12)])
def test_as_few_groups_as_fit(linear: None, gib: float, groups: int) -> None:
    """Of 13 + 1 GiB and a tenth of the GPU; 12 streams go into no five groups."""
    found = fitting_groups(SMALL, ROWS, TOKENS, *HOW, int(gib * GIB))
    assert found == Groups(groups, (1 + ROWS // groups) * GIB)


def test_where_nothing_fits(linear: None) -> None:
    with pytest.raises(InputError, match=r"one stream at a time takes 2\.0 GiB by calculation"):
        fitting_groups(SMALL, ROWS, TOKENS, *HOW, 3 * GIB)


PAPERS = ModelConfig(vocabulary_size=267_735)  # at 192 streams of 192 tokens


@pytest.fixture(scope="module")
def of_the_paper() -> dict[tuple[str, int], int]:
    """Bytes by core and streams at a time."""
    how = ("bf16-mixed", OptimizerName.lamb)
    return {
        (core, rows): training_bytes(PAPERS, rows, 192, core, *how)
        for core in ("recompute", "plain")
        for rows in (192, 1)
    }


@pytest.mark.parametrize(
    ("core", "groups"),
    [("recompute", {80: 1, 40: 1, 24: 1, 16: 2}), ("plain", {80: 2, 40: 3, 24: 6, 16: 8})],
)
def test_the_papers_step_on_gpus(
    of_the_paper: dict[tuple[str, int], int], core: str, groups: dict[int, int], monkeypatch: Any
) -> None:
    """What the plain core keeps is at least every layer's probabilities and dropped ones, in 2 bytes."""
    probabilities = 16 * 8 * 192 * 192 * (192 + 192 + 2048)
    assert (of_the_paper[core, 192] > 2 * 2 * probabilities) == (core == "plain")
    monkeypatch.setattr(fitting, "training_bytes", lambda config, rows, *how: of_the_paper[core, rows])
    how = (core, "bf16-mixed", OptimizerName.lamb)
    assert {
        gib: fitting_groups(PAPERS, 192, 192, *how, gib * GIB).accumulation for gib in (80, 40, 24, 16)
    } == groups


def test_the_gpus_memory_decides(linear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number stays; 0 asks the GPU, and a line says so; there is nothing to ask on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = SimpleNamespace(total_memory=7 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    def groups(accumulation: int, accelerator: str = "gpu") -> tuple[int, str]:
        trainer = TrainerConfig(
            accelerator=accelerator, core="plain", precision="bf16-mixed", accumulation=accumulation
        )
        schedule = ScheduleConfig(batch_size=ROWS, segment_length=TOKENS)
        return training_groups(trainer, schedule, OptimizerName.lamb, SMALL)

    assert groups(0) == (
        3,
        "trainer.accumulation: 3, with which a step takes 5.0 of the GPU's 7.0 GiB by calculation",
    )
    assert groups(2) == (2, "")
    assert groups(0, "cpu") == (1, "trainer.accumulation: 1, there is no GPU to fit")


def test_several_devices_need_a_number() -> None:
    settings = (OptimizerConfig(), ScheduleConfig(), EvaluationConfig())
    check_training(*settings, TrainerConfig(accumulation=0))
    with pytest.raises(InputError, match="is for one device"):
        check_training(*settings, TrainerConfig(accumulation=0, devices=2))


def test_a_run_records_what_was_taken(runs: Any, stop: Any, rows: Any, capsys: Any) -> None:
    """config.yaml keeps 0, so that the same command goes on."""
    whole = runs.run(runs.pretraining("whole"))
    settings = runs.pretraining("run", trainer__accumulation=0)
    stop.by_signal(lambda: runs.run(settings), 5)
    folder = runs.run(settings)
    assert rows(folder) == rows(whole)
    assert yaml.safe_load(folder.config.read_text())["trainer"]["accumulation"] == 0
    assert json.loads(folder.result.read_text())["accumulation"] == 1
    assert "trainer.accumulation: 1" in capsys.readouterr().out
