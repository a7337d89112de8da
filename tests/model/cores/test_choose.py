"""Which core computes: by setting, device and compilation, and who is told."""

import pytest
import torch
from support.reference import random_ids, random_model
from torch import Tensor

from allattn.errors import InputError
from allattn.model.cores.choose import CORES, attend, choose
from allattn.model.cores.inputs import CoreInputs
from allattn.training.config import CORES as SETTINGS
from allattn.training.config import (
    EvaluationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    check_training,
)
from allattn.training.runner import training_core


@pytest.mark.parametrize(
    ("wanted", "device", "compiled", "core"),
    [
        ("auto", "cpu", False, "recompute"),
        ("auto", "cuda", False, "recompute"),
        ("auto", "cuda", True, "plain"),
        ("auto", "cpu", True, "plain"),
        ("auto", "mps", False, "plain"),
        ("plain", "cuda", False, "plain"),
        ("recompute", "mps", False, "recompute"),
    ],
)
def test_choice(wanted: str, device: str, compiled: bool, core: str) -> None:
    assert choose(wanted, torch.device(device), compiled) == core


def test_settings_name_the_cores() -> None:
    assert {"auto", *CORES} == set(SETTINGS)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (TrainerConfig(core="fused"), "trainer.core=fused: must be one of auto, plain, recompute"),
        (TrainerConfig(core="recompute", compile=True), "trainer.core=recompute does not go with"),
    ],
)
def test_settings_are_refused(trainer: TrainerConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_training(OptimizerConfig(), ScheduleConfig(), EvaluationConfig(), trainer)


def test_training_core_follows_the_settings() -> None:
    on_cpu = {"accelerator": "cpu"}
    assert training_core(TrainerConfig(**on_cpu)) == "recompute"
    assert training_core(TrainerConfig(**on_cpu, compile=True)) == "plain"
    assert training_core(TrainerConfig(**on_cpu, core="plain")) == "plain"


def test_a_model_computes_with_the_core_it_is_told() -> None:
    """Every layer of it; untold, with the automatic one."""
    model, calls = random_model(layers=3), []

    def counting(inputs: CoreInputs) -> Tensor:
        calls.append(inputs.q.shape)
        return attend(inputs)

    assert all(layer.core is attend for layer in model.layers)
    expected, _ = model.hidden(ids := random_ids(2, 5), model.empty_memory(2))
    model.use_core(counting)
    found, _ = model.hidden(ids, model.empty_memory(2))
    assert len(calls) == 3
    assert torch.equal(found, expected)
