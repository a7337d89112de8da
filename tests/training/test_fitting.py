"""Which accumulation fits a GPU, by calculation, and what a run makes of trainer.accumulation=0."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
    TrainerConfig,
    check_training,
)
from allattn.training.fitting import GIB, fits, fitting_accumulation, training_bytes
from allattn.training.runner import training_accumulation
from allattn.training.step_memory import step_memory

SMALL = ModelConfig(vocabulary_size=500, layers=5, width=32, heads=2, persistent_vectors=64, cutoffs=[100])
ROWS, TOKENS = 12, 32
HOW = ("plain", "bf16-mixed", OptimizerName.lamb)


def test_layers_are_calculated_from_two() -> None:
    core, precision, optimizer = HOW
    whole = step_memory(SMALL, ROWS, TOKENS, core, precision, optimizer, keep_buffers=False)
    assert training_bytes(SMALL, ROWS, TOKENS, *HOW) == pytest.approx(whole.total, rel=0.01)


def test_as_few_groups_as_fit() -> None:
    """Memory for what three groups need, and a little less than that."""
    third, quarter = (training_bytes(SMALL, ROWS // groups, TOKENS, *HOW) for groups in (3, 4))
    assert quarter < third
    enough = int((third + GIB) / 0.9) + 1
    assert fits(third, enough)
    assert fitting_accumulation(SMALL, ROWS, TOKENS, *HOW, enough) == 3
    assert fitting_accumulation(SMALL, ROWS, TOKENS, *HOW, enough - 2) == 4
    assert fitting_accumulation(SMALL, ROWS, TOKENS, *HOW, 80 * GIB) == 1


def test_where_nothing_fits() -> None:
    with pytest.raises(InputError, match="one stream at a time takes"):
        fitting_accumulation(SMALL, 2, TOKENS, *HOW, GIB)


def test_the_gpus_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number stays; 0 asks the GPU; there is nothing to ask on a CPU."""
    third = training_bytes(SMALL, ROWS // 3, TOKENS, *HOW)
    found = SimpleNamespace(total_memory=int((third + GIB) / 0.9) + 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    def groups(accumulation: int, accelerator: str = "gpu") -> int:
        trainer = TrainerConfig(
            accelerator=accelerator, core="plain", precision="bf16-mixed", accumulation=accumulation
        )
        schedule = ScheduleConfig(batch_size=ROWS, segment_length=TOKENS)
        return training_accumulation(trainer, schedule, OptimizerName.lamb, SMALL)

    assert (groups(0), groups(2), groups(0, "cpu")) == (3, 2, 1)


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
