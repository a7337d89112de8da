"""trainer.precision=auto: what the device has, said in the record, and no change to a run of 32-true."""

import json
from typing import Any

import pytest
import torch
import yaml

from allattn.errors import InputError
from allattn.training.config import TrainerConfig
from allattn.training.runner import training_precision


@pytest.mark.parametrize(
    ("gpu", "bf16", "settings", "precision"),
    [
        (True, True, {}, "bf16-mixed"),
        (True, False, {}, "16-mixed"),
        (True, True, {"strategy": "fsdp"}, "bf16-mixed"),
        (True, False, {"strategy": "fsdp"}, "32-true"),
        (True, True, {"accelerator": "cpu"}, "32-true"),
        (False, False, {}, "32-true"),
        (True, True, {"precision": "32-true"}, "32-true"),
    ],
)
def test_auto_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, bf16: bool, settings: dict[str, str], precision: str
) -> None:
    """A GPU that only imitates bfloat16 counts as one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert training_precision(TrainerConfig(**settings)) == precision


def test_on_a_cpu_auto_is_32_true(runs: Any, rows: Any) -> None:
    """In every number and in the record, so a run of either goes on as the other."""
    auto = runs.run(runs.pretraining("auto", schedule__steps=4, trainer__precision="auto"))
    named = runs.run(runs.pretraining("named", schedule__steps=4))
    assert rows(auto) == rows(named)
    assert yaml.safe_load(auto.config.read_text())["trainer"]["precision"] == "32-true"
    assert json.loads(auto.result.read_text())["precision"] == "32-true"


def test_a_run_of_32_true_goes_on_under_auto(runs: Any, stop: Any, rows: Any) -> None:
    whole = runs.run(runs.pretraining("whole"))
    named = runs.pretraining("run")
    stop.by_signal(lambda: runs.run(named), 5)
    assert rows(runs.run(runs.pretraining("run", trainer__precision="auto"))) == rows(whole)


def test_another_precision_still_has_to_be_asked_for(runs: Any, stop: Any) -> None:
    mixed = runs.pretraining("run", trainer__precision="bf16-mixed")
    stop.by_signal(lambda: runs.run(mixed), 5)
    with pytest.raises(InputError, match=r"trainer\.precision: bf16-mixed -> 32-true"):
        runs.run(runs.pretraining("run", trainer__precision="auto"))
