import math
from typing import Any

import pytest

from allattn.errors import InputError
from allattn.pruning.config import GatesConfig, check_gates
from allattn.pruning.objective import lambda_at

PAPER = GatesConfig()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 0.02 / 4_000),
        (1_000, 0.005),
        (3_999, 0.02 * 3_999 / 4_000),
        (4_000, 0.02),
        (4_001, 0.02),
        (15_999, 0.02),
        (16_000, 0.0),
        (16_001, 0.0),
    ],
)
def test_lambda_over_the_steps(step: int, expected: float) -> None:
    assert lambda_at(PAPER, step) == pytest.approx(expected, rel=1e-12, abs=0)


def test_lambda_without_warm_up_is_full_at_once() -> None:
    assert lambda_at(GatesConfig(lambda_warmup_steps=0), 0) == 0.02


def test_freeze_at_the_end_of_the_warm_up() -> None:
    config = GatesConfig(lambda_warmup_steps=4, freeze_step=4)
    assert [lambda_at(config, step) for step in range(6)] == pytest.approx([0, 0.005, 0.01, 0.015, 0, 0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lambda_max": -0.1}, "gates.lambda_max=-0.1"),
        ({"lambda_warmup_steps": -1}, "gates.lambda_warmup_steps=-1"),
        ({"lambda_warmup_steps": 0, "freeze_step": 0}, "gates.freeze_step=0"),
        ({"freeze_step": 3_999}, "gates.freeze_step=3999"),
        ({"freeze_step": 20_001}, "schedule.steps=20000"),
        ({"beta": 0.0}, "gates.beta=0.0"),
        ({"gamma": 0.0}, "gates.gamma=0.0"),
        ({"zeta": 1.0}, "gates.zeta=1.0"),
        ({"threshold": 0.0}, "gates.threshold=0.0"),
        ({"threshold": 1.0}, "gates.threshold=1.0"),
        ({"learning_rate_ratio": 0.0}, "gates.learning_rate_ratio=0.0"),
    ],
)
def test_contradictory_settings_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as refusal:
        check_gates(GatesConfig(**changes), 20_000)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["lambda_max", "initial_pi", "beta", "gamma", "zeta", "learning_rate_ratio"])
def test_numbers_that_are_not_finite_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"gates.{name}"):
        check_gates(GatesConfig(**{name: math.nan}), 20_000)


@pytest.mark.parametrize("steps", [16_000, 56_000])
def test_paper_settings_are_accepted(steps: int) -> None:
    check_gates(PAPER, steps)
