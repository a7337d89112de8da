"""The paper's five variants are five files that differ in nothing but their techniques."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from allattn.settings import plain, prune_settings, register

CONF = Path(__file__).resolve().parents[2] / "conf"
EXPERIMENTS = ("paper", "small")
# Setting -> value, beside those of the full method.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "all_three": {},
    "no_lambda_warmup": {"gates.lambda_warmup_steps": 0},
    "no_positive_init": {"gates.initial_pi": 0.0},
    "no_output_scaling": {"gates.output_scaling": False},
    "none_of_three": {
        "gates.lambda_warmup_steps": 0,
        "gates.initial_pi": 0.0,
        "gates.output_scaling": False,
    },
}


@pytest.fixture(autouse=True)
def hydra_state() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def resolved(*overrides: str) -> dict[str, Any]:
    """Checked settings of prune.py by dotted name."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("prune", ["checkpoint=last.ckpt", *overrides])
    return dict(flat(plain(prune_settings(composed))))


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_there_are_the_papers_five() -> None:
    assert {path.stem for path in (CONF / "ablation").glob("*.yaml")} == set(TECHNIQUES)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("ablation", TECHNIQUES)
def test_variant_differs_in_its_techniques_alone(experiment: str, ablation: str) -> None:
    full = resolved(f"experiment={experiment}")
    variant = resolved(f"experiment={experiment}", f"ablation={ablation}")
    assert variant.keys() == full.keys()
    differing = {name: value for name, value in variant.items() if value != full[name]}
    wanted = dict(TECHNIQUES[ablation])
    if ablation != "all_three":
        wanted["ablation"] = ablation
    assert differing == wanted


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_default_is_the_full_method(experiment: str) -> None:
    full = resolved(f"experiment={experiment}")
    assert full["ablation"] == "all_three"
    assert full["gates.lambda_warmup_steps"] > 0
    assert experiment != "paper" or full["gates.lambda_warmup_steps"] == 4_000
    assert full["gates.initial_pi"] == 2.0
    assert full["gates.output_scaling"] is True
    assert full["gates.target_sparsity"] is None
    assert full["gates.selection"] == "l0"
