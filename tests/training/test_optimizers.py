import math
from collections.abc import Callable

import pytest
import torch

from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig, Shape
from allattn.training.optimizers import (
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
    parameter_groups,
    set_learning_rates,
)

COSINE = ScheduleConfig(steps=101, warmup_steps=20)
LAYER = ("query", "key", "value", "position", "output")


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 20),
        (1, 2 / 20),
        (18, 19 / 20),
        (19, 1.0),
        (20, 1.0),
        (60, 0.55),
        (80, 0.1 + 0.45 * (1 + math.cos(math.pi * 0.75))),
        (100, 0.1),
        (101, 0.1),
        (1_000, 0.1),
    ],
)
def test_cosine_after_the_warm_up(step: int, factor: float) -> None:
    assert learning_rate_factor(COSINE, step) == pytest.approx(factor, rel=1e-12)


def test_paper_rates() -> None:
    """0.01 at the end of the warm-up, 0.001 in the last of 56,000 updates, never above the peak."""
    paper = ScheduleConfig()
    factors = [learning_rate_factor(paper, step) for step in range(0, 56_000, 7)]
    assert learning_rate_factor(paper, 2_799) == 1
    assert learning_rate_factor(paper, 55_999) == pytest.approx(0.1)
    assert max(factors) <= 1
    assert factors[401:] == sorted(factors[401:], reverse=True)


@pytest.mark.parametrize(("step", "factor"), [(0, 0.25), (3, 1), (4, 1), (9, 1), (10**6, 1)])
def test_constant_after_the_warm_up(step: int, factor: float) -> None:
    schedule = ScheduleConfig(steps=10, warmup_steps=4, shape=Shape.constant)
    assert learning_rate_factor(schedule, step) == factor


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_short_runs_have_rates(steps: int, warmup_steps: int) -> None:
    schedule = ScheduleConfig(steps=steps, warmup_steps=warmup_steps)
    factors = [learning_rate_factor(schedule, step) for step in range(steps)]
    assert factors[0] == 1
    assert all(0.1 <= factor <= 1 for factor in factors)


def test_warm_up_of_the_whole_run() -> None:
    schedule = ScheduleConfig(steps=4, warmup_steps=4)
    assert [learning_rate_factor(schedule, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def groups_of(config: ModelConfig, name: OptimizerName = OptimizerName.adamw) -> list[dict[str, object]]:
    heads = [len(config.kept(layer)) for layer in range(config.layers)]
    gates = HeadGates(GatesConfig(), heads, 8, [1.0] * config.layers)
    return parameter_groups(AllAttentionLM(config), gates, OptimizerConfig(name=name, weight_decay=0.3), 10.0)


def names(group: dict[str, object]) -> list[str]:
    params = group["params"]
    assert isinstance(params, list)
    return [name for name, _ in params]


def test_groups_by_name(tiny_config: Callable[..., ModelConfig]) -> None:
    groups = groups_of(tiny_config(layers=1))
    assert {str(group["name"]): sorted(names(group)) for group in groups} == {
        "layer_matrices": sorted(
            [f"layers.0.{name}.weight" for name in LAYER]
            + ["layers.0.persistent_keys", "layers.0.persistent_values"]
        ),
        "other_matrices": [
            *(f"embedding.projections.{band}" for band in range(3)),
            *(f"embedding.tables.{band}" for band in range(3)),
            "positions.table",
            "softmax.cluster_weight",
            "softmax.head_projection",
        ],
        "vectors": [
            "layers.0.bias",
            "layers.0.content_bias",
            "layers.0.norm.bias",
            "layers.0.norm.weight",
            "layers.0.position_bias",
            *(f"softmax.biases.{band}" for band in range(3)),
            "softmax.cluster_bias",
        ],
        "gates": ["gates.pi.0"],
    }
    assert {group["name"]: (group["weight_decay"], group["learning_rate_ratio"]) for group in groups} == {
        "layer_matrices": (0.3, 1.0),
        "other_matrices": (0.3, 1.0),
        "vectors": (0.0, 1.0),
        "gates": (0.0, 10.0),
    }


def test_a_layer_without_heads_trains_its_bias_alone(tiny_config: Callable[..., ModelConfig]) -> None:
    groups = groups_of(tiny_config(layers=2, heads_kept=[[], [3]], output_scale=[8.0, 8.0]))
    every = [name for group in groups for name in names(group)]
    assert [name for name in every if name.startswith("layers.0.")] == ["layers.0.bias"]
    assert [name for name in every if name.startswith("gates.")] == ["gates.pi.1"]


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_learning_rates_of_the_groups(tiny_config: Callable[..., ModelConfig], name: OptimizerName) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.02)
    optimizer = make_optimizer(groups_of(tiny_config(), name), config)
    set_learning_rates(optimizer, 0.02, 0.5)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates.pop("gates") == pytest.approx(0.1)
    assert set(rates.values()) == {0.01}


def test_lamb_step_against_its_formula() -> None:
    """m = 0.1 g, v = 0.001 g^2, update = m / (sqrt v + eps), times |w| / |update| (You et al.)."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    group = {"name": "vectors", "params": [("w", weight)], "weight_decay": 0.0, "learning_rate_ratio": 1.0}
    optimizer = make_optimizer([group], OptimizerConfig(learning_rate=0.1))
    weight.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    optimizer.step()
    update = [0.1 / (math.sqrt(0.001) + 1e-6), -0.2 / (math.sqrt(0.004) + 1e-6)]
    trust = 5 / (math.hypot(*update) + 1e-6)
    assert weight.tolist() == pytest.approx(
        [3 - 0.1 * trust * update[0], 4 - 0.1 * trust * update[1]], rel=1e-9
    )


@pytest.mark.parametrize(("largest", "factor"), [(0.5, 0.1), (10.0, 1.0), (0.0, 1.0)])
def test_clipping(largest: float, factor: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter, gradient in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    assert float(clip_gradients(parameters, largest)) == 5
    clipped = [float(p.grad) for p in parameters if p.grad is not None]
    assert clipped == pytest.approx([3 * factor, 4 * factor], rel=1e-4)


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_a_loaded_state_leaves_the_options_as_they_are(
    tiny_config: Callable[..., ModelConfig], name: OptimizerName
) -> None:
    """Weight decay, betas and eps are the new settings'; moments and step counts are those of the state."""
    model = AllAttentionLM(tiny_config())
    made = []
    for config in (
        OptimizerConfig(name=name, weight_decay=0.1),
        OptimizerConfig(name=name, betas=[0.5, 0.6], eps=1e-3, weight_decay=0.2),
    ):
        optimizer = make_optimizer(parameter_groups(model, None, config), config)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.append(optimizer)
    old, new = made
    old.step()
    new.load_state_dict(old.state_dict())
    for group in new.param_groups:
        if "betas" in group:
            assert tuple(group["betas"]) == (0.5, 0.6)
        assert group["eps"] == 1e-3
        assert group["weight_decay"] == (0.0 if group["name"] == "vectors" else 0.2)
    ours, theirs = new.state_dict()["state"], old.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, entries in ours.items():
        assert entries.keys() == theirs[number].keys()
        assert all(
            torch.equal(torch.as_tensor(entries[k]), torch.as_tensor(theirs[number][k])) for k in entries
        )
    if name is OptimizerName.lamb:
        assert {group["step"] for group in new.param_groups} == {1}, "what it counts in its groups is state"
