"""Training on after the removal is training on with the closed heads multiplied by 0, only smaller.

Both continue from one gated state at the freeze. With AdamW the update of an element depends on that element
alone (and on the total gradient norm, to which closed heads add nothing), so the losses agree. Moments of the
removed heads go on moving their weights in the masked model; nothing sees those.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn.model.config import model_config_from_dict
from allattn.model.language_model import AllAttentionLM, Memory
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.pruning.surgery import RemovalPlan, cut_tensor
from allattn.randomness import generator
from allattn.training.checkpoints import FORMAT_VERSION
from allattn.training.config import OptimizerConfig, OptimizerName
from allattn.training.cutting import cut_checkpoint, freeze_plan
from allattn.training.optimizers import clip_gradients, make_optimizer, parameter_groups

pytestmark = pytest.mark.numeric

KEPT = [[0, 2, 3, 5, 6, 7], [], [1, 4]]  # one layer without heads
GATED_STEPS, FURTHER_STEPS = 5, 50
ADAMW = OptimizerConfig(OptimizerName.adamw, 0.002, eps=1e-8, weight_decay=0.1, gradient_clip=0.5)
LAMB = OptimizerConfig(OptimizerName.lamb, 0.002, gradient_clip=0.5)

Models = Callable[..., AllAttentionLM]


@dataclass
class Trained:
    """A model in training with its optimizer and segment memory."""

    model: AllAttentionLM
    optimizer: torch.optim.Optimizer
    memory: Memory

    def gradients(self, step: int, multipliers: list[Tensor] | None, clip: float) -> float:
        """Loss of this step's segment; leaves clipped gradients."""
        words = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        nats, self.memory = self.model(words[:, :-1], words[:, 1:], self.memory, multipliers)
        nats.mean().backward()
        clip_gradients([p for group in self.optimizer.param_groups for p in group["params"]], clip)
        return float(nats.mean().detach())

    def losses(self, multipliers: list[Tensor] | None, clip: float) -> list[float]:
        """Losses of the steps after the freeze, each followed by its update."""
        found = []
        for step in range(GATED_STEPS, GATED_STEPS + FURTHER_STEPS):
            found.append(self.gradients(step, multipliers, clip))
            self.optimizer.step()
        return found


@dataclass
class Freeze:
    """The two ways to go on from one freeze."""

    masked: Trained
    multipliers: list[Tensor]  # s_g * g_i at the freeze, constants
    cut: Trained
    plan: RemovalPlan


def freeze(model: AllAttentionLM, config: OptimizerConfig) -> Freeze:
    """Some steps with sampled gates, then both continuations, each with its own copy of everything."""
    model.train()
    gates = HeadGates(GatesConfig(), [8] * 3, 8, [1.0] * 3)
    with torch.no_grad():
        for pi, kept in zip(gates.pi, KEPT, strict=True):
            pi.copy_(torch.tensor([1.0 if head in kept else -1.0 for head in range(8)]))
    gates = gates.double()
    optimizer = make_optimizer(parameter_groups(model, gates, config), config)
    gated = Trained(model, optimizer, model.empty_memory(2))
    for step in range(GATED_STEPS):
        sampled = gates.multipliers(gates.sample(generator(1, "gates", step)))
        gated.gradients(step, sampled, config.gradient_clip)
        optimizer.step()
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"gates.{name}": tensor for name, tensor in gates.state_dict().items()}
    checkpoint = {
        "state_dict": state,
        "optimizer_states": [copy.deepcopy(optimizer.state_dict())],
        "allattn": {
            "format_version": FORMAT_VERSION,
            "model": model.config.to_dict(),
            "phase": "gates",
            "output_scaling": True,
            "target_sparsity": None,
        },
    }
    plan = freeze_plan(checkpoint)
    after = cut_checkpoint(checkpoint, plan)
    assert plan.after.heads_kept == KEPT
    smaller = AllAttentionLM(model_config_from_dict(after["allattn"]["model"])).double()
    smaller.load_state_dict({name.removeprefix("model."): t for name, t in after["state_dict"].items()})
    fresh = make_optimizer(parameter_groups(smaller, None, config), config)
    fresh.load_state_dict(after["optimizer_states"][0])
    memory = [layer.clone() for layer in gated.memory]
    multipliers = [values.detach() for values in gates.multipliers(gates.decide())]
    return Freeze(gated, multipliers, Trained(smaller.train(), fresh, memory), plan)


def moments(trained: Trained) -> dict[str, dict[str, Any]]:
    named = {p: name for name, p in trained.model.named_parameters()}
    return {named[p]: state for p, state in trained.optimizer.state.items() if p in named}


def relative_difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("family", [{}, {"persistent_vectors": 0, "feed_forward": 9}], ids=str)
def test_adamw_gives_the_same_losses(random_model: Models, family: dict[str, int]) -> None:
    both = freeze(random_model(torch.float64, **family), ADAMW)
    before = {name: p.detach().clone() for name, p in both.masked.model.named_parameters()}
    masked = both.masked.losses(both.multipliers, ADAMW.gradient_clip)
    cut = both.cut.losses(None, ADAMW.gradient_clip)
    assert len(masked) == FURTHER_STEPS
    torch.testing.assert_close(torch.tensor(cut), torch.tensor(masked), rtol=0, atol=1e-9)
    assert masked[-1] < masked[0] - 0.1, "the models trained"
    full, small = both.masked.model.state_dict(), both.cut.model.state_dict()
    for name, parameter in both.cut.model.named_parameters():
        if parameter.requires_grad:
            expected = cut_tensor(name, full[name], both.plan)
            torch.testing.assert_close(small[name], expected, rtol=0, atol=1e-8)
    removed = "layers.1.query.weight"
    assert not torch.equal(full[removed], before[removed]), "moments still move masked heads"


def test_adamw_needs_the_moments(random_model: Models) -> None:
    """Without the carried moments the losses part: the test above compares what it claims to compare."""
    both = freeze(random_model(torch.float64), ADAMW)
    fresh = make_optimizer(parameter_groups(both.cut.model, None, ADAMW), ADAMW)
    both.cut.optimizer = fresh
    masked = both.masked.losses(both.multipliers, ADAMW.gradient_clip)
    cut = both.cut.losses(None, ADAMW.gradient_clip)
    assert cut[0] == pytest.approx(masked[0], abs=1e-9)
    assert max(abs(a - b) for a, b in zip(cut, masked, strict=True)) > 1e-4


def test_adamw_needs_the_scale_of_the_freeze(random_model: Models) -> None:
    both = freeze(random_model(torch.float64), ADAMW)
    for layer in both.cut.model.layers:
        layer.scale = 1.0
    masked = both.masked.losses(both.multipliers, ADAMW.gradient_clip)
    assert abs(both.cut.losses(None, ADAMW.gradient_clip)[0] - masked[0]) > 1e-3


def test_lamb_differs_by_the_trust_ratio_of_whole_tensors(random_model: Models) -> None:
    """LAMB scales a tensor's update by ||w|| / ||update||; in the masked model both norms count closed heads.

    They count their weights, and the moments that they had at the freeze. So the first update of a tensor
    with removed heads is, on the heads that stay, the cut model's in another length but not in another
    direction; tensors that belong to no head get the same update. From the second step on losses differ.
    """
    both = freeze(random_model(torch.float64), LAMB)
    steps = []
    for trained, multipliers in ((both.masked, both.multipliers), (both.cut, None)):
        before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
        loss = trained.gradients(GATED_STEPS, multipliers, LAMB.gradient_clip)
        trained.optimizer.step()
        steps.append((loss, {n: p.detach() - before[n] for n, p in trained.model.named_parameters()}, before))
    (masked_loss, masked, weights), (cut_loss, cut, cut_weights) = steps
    assert cut_loss == pytest.approx(masked_loss, abs=1e-9)
    rescaled = 0
    full_moments, cut_moments = moments(both.masked), moments(both.cut)
    for name, parameter in both.cut.model.named_parameters():
        if not parameter.requires_grad:
            continue
        kept = cut_tensor(name, masked[name], both.plan)
        ratio = trust(cut_weights[name], cut_moments[name]) / trust(weights[name], full_moments[name])
        torch.testing.assert_close(kept * ratio, cut[name], rtol=1e-6, atol=1e-12)
        if kept.shape == masked[name].shape:
            assert ratio == pytest.approx(1, abs=1e-9), name
        else:
            rescaled += abs(ratio - 1) > 0.01
    assert rescaled >= 9, "most tensors with removed heads are rescaled"


def trust(weight: Tensor, state: dict[str, Tensor]) -> float:
    """LAMB's factor for a tensor (You et al. 2020), from the moments after the step."""
    update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + LAMB.eps)
    return float(weight.norm().clamp(max=10) / update.norm())


def test_lamb_trains_on_with_finite_losses(random_model: Models) -> None:
    both = freeze(random_model(torch.float64), LAMB)
    masked = both.masked.losses(both.multipliers, LAMB.gradient_clip)
    cut = both.cut.losses(None, LAMB.gradient_clip)
    assert all(map(torch.isfinite, torch.tensor(masked + cut)))
    assert cut[0] == pytest.approx(masked[0], abs=1e-9)
    assert max(abs(a - b) for a, b in zip(cut, masked, strict=True)) > 1e-9, "not the same, as said above"
    assert cut[-1] < cut[0]
    assert masked[-1] < masked[0]
