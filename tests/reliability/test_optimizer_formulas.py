"""The optimizers' arithmetic against formulas written out here, and their state over a save."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.settings import in_steps
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig
from allattn.training.lamb import WholeNormLamb
from allattn.training.optimizers import make_optimizer, parameter_groups, set_learning_rates

RATE, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-6, 0.1
Toy = dict[str, nn.Parameter]


def config(name: OptimizerName, decay: float = DECAY) -> OptimizerConfig:
    return OptimizerConfig(name, RATE, list(BETAS), EPS, decay)


def toy() -> Toy:
    """Two matrices and a vector, small enough to follow."""
    noise = torch.Generator().manual_seed(0)

    def values(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=noise, dtype=torch.float64))

    return {"layers.0.w": values(4, 3), "table": values(5, 2), "bias": values(3)}


def toy_groups(parameters: Toy, decay: float = DECAY) -> list[dict[str, Any]]:
    names = {"layer_matrices": "layers.0.w", "other_matrices": "table", "vectors": "bias"}
    return [
        {
            "name": group,
            "params": [(name, parameters[name])],
            "weight_decay": 0.0 if group == "vectors" else decay,
            "learning_rate_ratio": 1.0,
        }
        for group, name in names.items()
    ]


def gradient(name: str, step: int) -> Tensor:
    shape = {"layers.0.w": (4, 3), "table": (5, 2), "bias": (3,)}[name]
    noise = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(shape, generator=noise, dtype=torch.float64)


def take_steps(optimizer: torch.optim.Optimizer, parameters: Toy, steps: range) -> None:
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, step)
        optimizer.step()


def lamb(parameters: Toy, steps: int) -> dict[str, Tensor]:
    """You et al., version 3: no bias correction, |w| at most 10, no trust ratio for a zero tensor."""
    result = {}
    for name, parameter in parameters.items():
        w = parameter.detach().clone()
        m = v = torch.zeros_like(w)
        for step in range(steps):
            g = gradient(name, step)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            update = m / (v.sqrt() + EPS)
            norm, size = min(float(w.norm()), 10.0), float(update.norm())
            trust = norm / (size + EPS) if norm > 0 and size > 0 else 1.0
            w = w - RATE * trust * update
        result[name] = w
    return result


@pytest.mark.parametrize("steps", [1, 4])
def test_lamb(steps: int) -> None:
    parameters = toy()
    with torch.no_grad():
        parameters["table"].mul_(30 / parameters["table"].norm())  # beyond the clamp
        parameters["bias"].zero_()
    expected = lamb(parameters, steps)
    optimizer = make_optimizer(toy_groups(parameters, 0.0), config(OptimizerName.lamb, 0.0))
    take_steps(optimizer, parameters, range(steps))
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=0, msg=name)


def test_lamb_of_single_weights_is_that_of_weights_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU one weight follows the other, on a GPU all of a group go together; the group does not tell."""
    ways: set[str] = set()
    results, groups = [], []

    def noted(name: str) -> Callable[..., None]:
        own = getattr(WholeNormLamb, name)

        def note(*arguments: Any) -> None:
            ways.add(name)
            own(*arguments)

        return note

    for name in ("update", "_step_foreach"):
        monkeypatch.setattr(WholeNormLamb, name, noted(name))
    for way in ("update", "_step_foreach"):
        ways.clear()
        if way == "_step_foreach":
            monkeypatch.setattr(WholeNormLamb, "_can_use_foreach", lambda self, group: True)
        parameters = toy()
        optimizer = make_optimizer(toy_groups(parameters, 0.0), config(OptimizerName.lamb, 0.0))
        take_steps(optimizer, parameters, range(3))
        assert ways == {way}
        results.append([p.detach() for p in parameters.values()])
        groups.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)
    assert groups[0] == groups[1]


def test_lamb_step_is_the_rate_times_the_clamped_norm() -> None:
    """Up to a factor that all tensors share: trust ratios and their clamp, whatever the bias correction."""
    parameters = toy()
    with torch.no_grad():
        parameters["table"].mul_(30 / parameters["table"].norm())
        parameters["bias"].mul_(2 / parameters["bias"].norm())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    take_steps(make_optimizer(toy_groups(parameters, 0.0), config(OptimizerName.lamb)), parameters, range(1))
    moved = {name: float((p.detach() - before[name]).norm()) for name, p in parameters.items()}
    assert moved["table"] / moved["bias"] == pytest.approx(10 / 2, rel=1e-5)
    expected = float(before["layers.0.w"].norm()) / 2
    assert moved["layers.0.w"] / moved["bias"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
def test_adamw(steps: int) -> None:
    """Loshchilov & Hutter: decay first, then the bias-corrected step; vectors are not decayed."""
    parameters = toy()
    expected = {}
    for name, parameter in parameters.items():
        w = parameter.detach().clone()
        m = v = torch.zeros_like(w)
        for step in range(steps):
            g = gradient(name, step)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            w = w * (1 - RATE * (0.0 if name == "bias" else DECAY))
            corrected = (v / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS
            w = w - RATE * m / (1 - BETAS[0] ** (step + 1)) / corrected
        expected[name] = w
    take_steps(make_optimizer(toy_groups(parameters), config(OptimizerName.adamw)), parameters, range(steps))
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=0, msg=name)


def test_muon_moves_the_layers_matrices_and_adamw_the_rest() -> None:
    """Against torch's two optimizers, each alone."""
    parameters, alone = toy(), toy()
    optimizer = make_optimizer(toy_groups(parameters), config(OptimizerName.muon))
    muon = torch.optim.Muon(
        [alone["layers.0.w"]], lr=RATE, weight_decay=DECAY, eps=EPS, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [alone["table"]], "weight_decay": DECAY},
            {"params": [alone["bias"]], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=BETAS,
        eps=EPS,
    )
    take_steps(optimizer, parameters, range(3))
    for step in range(3):
        for name, parameter in alone.items():
            parameter.grad = gradient(name, step)
        muon.step()
        adamw.step()
    start = toy()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, alone[name]), name
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_saved_state_goes_on_bit_identically(name: OptimizerName) -> None:
    parameters, resumed = toy(), toy()
    optimizer = make_optimizer(toy_groups(parameters), config(name))
    take_steps(optimizer, parameters, range(3))
    weights = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    saved = copy.deepcopy(optimizer.state_dict())
    take_steps(optimizer, parameters, range(3, 6))

    def go_on(load: bool) -> None:
        with torch.no_grad():
            for key, parameter in resumed.items():
                parameter.copy_(weights[key])
        again = make_optimizer(toy_groups(resumed), config(name))
        if load:
            again.load_state_dict(saved)
        take_steps(again, resumed, range(3, 6))

    go_on(load=True)
    for key in parameters:
        assert torch.equal(parameters[key], resumed[key]), key
    go_on(load=False)
    assert not any(torch.equal(parameters[key], resumed[key]) for key in parameters), "the state matters"


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_decay_shrinks_matrices_only(tiny_config: Callable[..., ModelConfig], name: OptimizerName) -> None:
    """A step with and one without decay differ in matrices alone, and there they differ by shrinking."""
    model_config = tiny_config(layers=1)

    def step(decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        model, gates = AllAttentionLM(model_config), HeadGates(GatesConfig(), [8], 8, [1.0])
        settings = config(name, decay)
        optimizer = make_optimizer(parameter_groups(model, gates, settings), settings)
        named = dict(model.named_parameters()) | {f"gates.{n}": p for n, p in gates.named_parameters()}
        before = {n: p.detach().clone() for n, p in named.items()}
        noise = torch.Generator().manual_seed(1)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=noise)
        optimizer.step()
        return before, {n: p.detach().clone() for n, p in named.items()}

    before, plain = step(0.0)
    _, decayed = step(0.5)
    for parameter, value in plain.items():
        if value.ndim < 2:
            assert torch.equal(value, decayed[parameter]), parameter
        else:
            difference = decayed[parameter] - value
            assert float((difference * before[parameter]).sum()) < 0, parameter


def test_gates_learn_at_their_own_rate(tiny_config: Callable[..., ModelConfig]) -> None:
    """AdamW's first step is the learning rate itself, so a gate's is ratio times a weight's."""
    torch.manual_seed(0)
    model, gates = AllAttentionLM(tiny_config(layers=1)), HeadGates(GatesConfig(), [8], 8, [1.0])
    settings = OptimizerConfig(OptimizerName.adamw, 0.01, eps=0.0)
    optimizer = make_optimizer(parameter_groups(model, gates, settings, 7.0), settings)
    set_learning_rates(optimizer, settings.learning_rate, 0.5)
    layer: Any = model.layers[0]
    before = [layer.bias.detach().clone(), gates.pi[0].detach().clone()]
    layer.bias.grad = torch.ones(32)
    gates.pi[0].grad = torch.ones(8)
    optimizer.step()
    moved = [before[0] - layer.bias.detach(), before[1] - gates.pi[0].detach()]
    torch.testing.assert_close(moved[0], torch.full((32,), 0.005))
    torch.testing.assert_close(moved[1], torch.full((8,), 0.035))


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ({"tokens": 960, "warmup_tokens": 96}, 40, 4),
        ({"tokens": 961, "warmup_tokens": 97}, 41, 5),  # rounded up
        ({"tokens": 1, "warmup_tokens": 0}, 1, 0),
        ({"tokens": 2_400}, 100, 3),
        ({"warmup_tokens": 24}, 7, 1),
        ({}, 7, 3),
    ],
)
def test_lengths_in_tokens_become_steps(given: dict[str, Any], steps: int, warmup: int) -> None:
    schedule = in_steps(ScheduleConfig(batch_size=4, segment_length=6, steps=7, warmup_steps=3, **given))
    assert (schedule.steps, schedule.warmup_steps) == (steps, warmup)
    assert in_steps(schedule) == schedule


def test_papers_run_in_tokens() -> None:
    """20 epochs of 103,227,021 tokens at 192 x 192 a step are 56,005 steps; one is 2,801."""
    schedule = in_steps(ScheduleConfig(tokens=20 * 103_227_021, warmup_tokens=103_227_021))
    assert schedule.steps == math.ceil(20 * 103_227_021 / 36_864) == 56_005
    assert schedule.warmup_steps == 2_801
