import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn.data.segments import Segment
from allattn.model.attention import AllAttention
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig, Penalty
from allattn.pruning.gates import (
    HeadGates,
    decide_gates,
    output_scale,
    penalty,
    sample_gates,
    soft_sample,
)
from allattn.pruning.objective import learned_gates
from allattn.randomness import generator
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig
from allattn.training.language_task import LanguageTask
from allattn.training.optimizers import make_optimizer, parameter_groups, set_learning_rates

SAMPLES = 100_000
CONFIG = GatesConfig()
Models = Callable[..., AllAttentionLM]


def uniform(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def within(share: float, probability: float) -> bool:
    """Four standard deviations of a binomial share."""
    return abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / SAMPLES)


@pytest.mark.parametrize(("pi", "probability"), [(2.0, 0.8808), (0.0, 0.5), (-2.0, 0.1192)])
def test_open_probability(pi: float, probability: float) -> None:
    gates = sample_gates(torch.full((SAMPLES,), pi, dtype=torch.float64), uniform(SAMPLES), CONFIG)
    assert within(float((gates > 0.5).double().mean()), probability)


@pytest.mark.parametrize(
    ("threshold", "beta", "gamma", "zeta"), [(0.2, 1 / 3, -0.1, 1.1), (0.8, 2 / 3, -0.3, 1.2)]
)
def test_open_probability_follows_the_settings(
    threshold: float, beta: float, gamma: float, zeta: float
) -> None:
    """s >= threshold where the concrete sample reaches q: P = sigmoid(pi - beta logit(q))."""
    config = GatesConfig(threshold=threshold, beta=beta, gamma=gamma, zeta=zeta)
    gates = sample_gates(torch.full((SAMPLES,), 0.4, dtype=torch.float64), uniform(SAMPLES), config)
    q = (threshold - gamma) / (zeta - gamma)
    probability = sigmoid(0.4 - beta * math.log(q / (1 - q)))
    assert abs(probability - sigmoid(0.4)) > 0.03
    assert within(float((gates > 0.5).double().mean()), probability)


def test_open_probability_of_the_module_draws() -> None:
    gates = HeadGates(CONFIG, [SAMPLES], 8, [1.0])
    (drawn,) = gates.sample(torch.Generator().manual_seed(0))
    assert within(float((drawn.detach() > 0.5).float().mean()), 0.8808)


def test_share_of_stretched_samples_above_zero() -> None:
    soft = soft_sample(torch.full((SAMPLES,), 2.0, dtype=torch.float64), uniform(SAMPLES), CONFIG)
    assert within(float((soft > 0).double().mean()), 0.9426)
    assert float(soft.min()) == 0
    assert float(soft.max()) == 1, "with zeta above 1 a gate can be fully open"


def test_sampled_gates_are_exactly_zero_or_one() -> None:
    pi = torch.full((SAMPLES,), 0.3)
    gates = sample_gates(pi, uniform(SAMPLES).float(), CONFIG)
    assert set(gates.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("form", "expected"), [(Penalty.stretched, 7.541), (Penalty.hard, 8 * 0.880797)], ids=str
)
def test_penalty_of_eight_heads(form: Penalty, expected: float) -> None:
    assert float(penalty(torch.full((8,), 2.0), GatesConfig(penalty=form))) == pytest.approx(
        expected, abs=5e-4
    )


@pytest.mark.parametrize(
    ("form", "shift"), [(Penalty.stretched, math.log(0.1 / 1.1) / 3), (Penalty.hard, 0.0)], ids=str
)
def test_penalty_gradient(form: Penalty, shift: float) -> None:
    pi = torch.tensor([-3.0, 0.0, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    penalty(pi, GatesConfig(penalty=form)).backward()
    p = [sigmoid(x - shift) for x in (-3.0, 0.0, 0.7, 2.0)]
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx([x * (1 - x) for x in p], rel=1e-12)


def test_penalty_sums_every_gate_once() -> None:
    gates = HeadGates(CONFIG, [8, 3, 0], 8, [1.0] * 3)
    assert gates.penalty().item() == pytest.approx(11 * 7.541 / 8, abs=1e-3)


def test_straight_through_gradient() -> None:
    """d(sum w g)/d pi = w (zeta - gamma) s (1 - s) / beta where the stretched sample is inside (0, 1)."""
    config = GatesConfig(beta=0.6, gamma=-0.2, zeta=1.3)
    points = [(0.5, 0.1), (2.0, 0.9), (-1.0, 0.4), (0.2, 0.3), (3.0, 0.99), (-4.0, 0.2)]
    weights = [1.0, -2.0, 0.5, 3.0, 7.0, 11.0]
    expected = []
    for (x, u), w in zip(points, weights, strict=True):
        s = sigmoid((math.log(u) - math.log(1 - u) + x) / 0.6)
        inside = 0 < -0.2 + 1.5 * s < 1
        expected.append(w * 1.5 * s * (1 - s) / 0.6 if inside else 0.0)
    assert 0 < sum(value == 0 for value in expected) < len(expected)
    pi = torch.tensor([x for x, _ in points], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([u for _, u in points], dtype=torch.float64)
    (sample_gates(pi, u, config) * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx(expected, rel=1e-10)


def test_evaluation_gate_is_open_iff_pi_is_above_zero() -> None:
    assert decide_gates([torch.tensor([-1.0, 0.0, 1e-30, 2.0])], None)[0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("still_open", "expected"), [(8, 1), (7, 8 / 7), (6, 8 / 6), (1, 8), (0, 8)])
def test_output_scale(still_open: int, expected: float) -> None:
    gates = torch.tensor([1.0] * still_open + [0.0] * (8 - still_open), dtype=torch.float64)
    assert float(output_scale(gates, 8)) == pytest.approx(expected, rel=1e-12)


def test_output_scale_uses_the_original_head_count() -> None:
    gates = HeadGates(CONFIG, [6], 8, [8 / 6])
    (scale,) = gates.scales([torch.tensor([1.0, 1, 1, 0, 0, 1])])
    assert float(scale) == 2


def test_without_output_scaling_the_scale_stays_constant() -> None:
    gates = HeadGates(GatesConfig(output_scaling=False), [4, 4], 4, [1.0, 1.5])
    closed = torch.tensor([1.0, 0, 0, 1])
    assert [float(s) for s in gates.scales([closed, closed])] == [1.0, 1.5]
    assert [m.tolist() for m in gates.multipliers([closed, closed])] == [[1, 0, 0, 1], [1.5, 0, 0, 1.5]]


@pytest.mark.parametrize("with_gradient", [False, True])
def test_gradient_through_the_scale(with_gradient: bool) -> None:
    """m_i = H g_i / S; its derivative by g_j is H / S on the diagonal, and -H g_i / S^2 more if asked for."""
    gates = HeadGates(GatesConfig(scale_gradient=with_gradient), [4], 4, [1.0])
    g = torch.tensor([1.0, 0, 1, 1], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    (gates.multipliers([g])[0] * weights).sum().backward()
    own = 4 / 3 * weights
    through = -4 / 9 * (1 + 3 + 4) if with_gradient else 0.0
    assert g.grad is not None
    assert g.grad.tolist() == pytest.approx((own + through).tolist(), rel=1e-12)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_all_gates_closed_gives_the_bias_and_no_nan(random_model: Models, with_gradient: bool) -> None:
    model = random_model(layers=1)
    layer = model.layers[0]
    assert isinstance(layer, AllAttention)
    gates = HeadGates(GatesConfig(scale_gradient=with_gradient, initial_pi=-1.0), [8], 8, [1.0])
    soft = sample_gates(gates.pi[0], torch.full((8,), 0.6), gates.config)
    assert soft.tolist() == [0.0] * 8
    (multipliers,) = gates.multipliers([soft])
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = layer(x, x.new_zeros(2, 0, 32), model.positions(5, 7), 7, multipliers)
    assert torch.equal(out, x + layer.bias)
    out.square().sum().backward()
    for parameter in (x, *gates.parameters(), *layer.parameters()):
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    assert float(gates.pi[0].grad.abs().sum()) > 0, "a closed gate can open again"


@pytest.mark.numeric
def test_open_gates_leave_a_dense_model_as_it_is(random_model: Models) -> None:
    model = random_model().train()
    gates = HeadGates(GatesConfig(initial_pi=40.0), [8] * 3, 8, [1.0] * 3)
    ids = torch.arange(24).view(2, 12)
    sampled = gates.multipliers(gates.sample(torch.Generator().manual_seed(0)))
    dense, _ = model(ids, ids + 1, model.empty_memory(2))
    gated, _ = model(ids, ids + 1, model.empty_memory(2), sampled)
    decided, _ = model(ids, ids + 1, model.empty_memory(2), gates.multipliers(gates.decide()))
    assert torch.equal(gated, dense)
    assert torch.equal(decided, dense)


def test_noise_is_drawn_for_each_head_layer_and_step() -> None:
    gates = HeadGates(GatesConfig(initial_pi=0.0), [64, 64], 64, [1.0] * 2)
    first, second = gates.sample(generator(1, "gates", 0))
    assert 16 < int(first.sum()) < 48
    assert not torch.equal(first, second)
    again, _ = gates.sample(generator(1, "gates", 0))
    later, _ = gates.sample(generator(1, "gates", 1))
    assert torch.equal(again, first)
    assert not torch.equal(later, first)


def gate_task(model: AllAttentionLM, optimizer: OptimizerConfig | None = None, **gates: Any) -> LanguageTask:
    schedule = ScheduleConfig(batch_size=2, segment_length=6, steps=100, warmup_steps=0)
    config = GatesConfig(freeze_step=100, **gates)
    objective = learned_gates(config, model.config, 1)
    return LanguageTask(model, objective, optimizer or OptimizerConfig(), schedule, 1)


def pi_gradient(task: LanguageTask, batch: Segment) -> Tensor:
    task.zero_grad()
    task.training_step(batch, 0).backward()
    return torch.cat([pi.grad for pi in task.gates.pi if pi.grad is not None])


def test_noise_is_shared_over_the_batch(random_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    seen: list[Tensor] = []
    forward = AllAttentionLM.forward

    def watched(self: AllAttentionLM, *args: Any, **known: Any) -> Any:
        nats, memory = forward(self, *args, **known)
        seen.append(nats)
        return nats, memory

    monkeypatch.setattr(AllAttentionLM, "forward", watched)
    row = torch.arange(7)
    batch = Segment(row[:-1].repeat(3, 1), row[1:].repeat(3, 1), 0, True)
    gate_task(model, initial_pi=0.0).training_step(batch, 0)
    dense, _ = model(batch.inputs, batch.targets, model.empty_memory(3))
    torch.testing.assert_close(seen[0][1:], seen[0][:1].expand(2, -1))
    assert not torch.allclose(seen[0], dense), "some gate is closed"


def test_lambda_zero_gives_no_gradient_from_the_penalty(random_model: Models) -> None:
    row = torch.arange(7).repeat(2, 1)
    batch = Segment(row[:, :-1], row[:, 1:], 0, True)
    model = random_model()
    off = pi_gradient(gate_task(model, lambda_max=0.0, lambda_warmup_steps=0), batch)
    warming = pi_gradient(gate_task(model, lambda_max=0.5, lambda_warmup_steps=10), batch)
    full_task = gate_task(model, lambda_max=0.5, lambda_warmup_steps=0)
    full = pi_gradient(full_task, batch)
    p = sigmoid(2 - math.log(0.1 / 1.1) / 3)
    assert torch.equal(off, warming), "lambda is 0 before the first update"
    torch.testing.assert_close(full - off, torch.full((24,), 0.5 * p * (1 - p)), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    list(OptimizerName),
    ids=str,
)
def test_without_data_loss_every_gate_falls_and_closes(random_model: Models, name: OptimizerName) -> None:
    optimizer_config = OptimizerConfig(name=name, learning_rate=0.002)
    task = gate_task(random_model(), optimizer_config, lambda_max=0.1, lambda_warmup_steps=0)
    zero = torch.zeros(2, 6)
    task.model.forward = lambda *args, counts: (zero, [])  # type: ignore[method-assign]
    optimizer = make_optimizer(
        parameter_groups(task.model, task.gates, optimizer_config, 10.0), optimizer_config
    )
    set_learning_rates(optimizer, optimizer_config.learning_rate, 1.0)
    before = torch.cat(list(task.gates.pi)).detach().clone()
    batch = Segment(zero.long(), zero.long(), 0, True)
    for _ in range(400):
        pi_gradient(task, batch)
        optimizer.step()
        now = torch.cat(list(task.gates.pi)).detach().clone()
        assert (now < before).all()
        before = now
    assert all(int(gate.sum()) == 0 for gate in task.gates.decide())
