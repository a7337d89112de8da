"""What the gates add to the next-token loss: lambda times the penalty, and a multiplier for every head.

    loss = nats per token + lambda(t) * sum over the gates of their penalty

    NoGates         pretraining: nothing is added
    FrozenGates     fine-tuning: nothing either, heads and s_g stay as they are since the removal
    ScheduledGates  lambda follows the steps: 0 to lambda_max over the warm-up, then constant
    TargetGates     lambda is controlled, so that the expected sparsity follows a target

All four answer the same questions, so that training knows no difference. Steps count completed optimizer
updates, never micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.model.gated import Sizes
from allattn.pruning.config import GatesConfig, Unit
from allattn.pruning.gates import HeadGates, by_head
from allattn.pruning.phase import Phase
from allattn.randomness import generator


@dataclass(frozen=True)
class Draw:
    """The objective at one step."""

    multipliers: list[Tensor] | None = None  # s_g * g_i of sampled gates, (h,) per layer; None = none
    weight: float | Tensor = 0.0  # lambda, a scalar
    penalty: float | Tensor = 0.0  # summed over all gates, a scalar with gradient
    opened: float | Tensor = 0.0  # number of sampled gates that are 1


class NoGates(nn.Module):
    """The objective of pretraining."""

    phase = Phase.pretrain
    learning_rate_ratio = 1.0  # learning rate of this module's parameters / that of the weights

    def draw(self, step: int) -> Draw:
        """Multipliers, lambda and penalty of the update that follows `step` completed ones."""
        return Draw()

    def end_step(self, step: int) -> None:
        """The losses of the update that follows `step` completed ones have been computed."""

    def decided_multipliers(self) -> list[Tensor] | None:
        """What evaluation multiplies the heads' outputs by, (h,) per layer; None = by what the model has."""
        return None

    def step_metrics(self, draw: Draw, loss: float | Tensor) -> dict[str, Any]:
        """Columns about the update for which `draw` was drawn; `loss` is its mean in nats per token."""
        return {}

    def metrics(self, learning_rate: float) -> dict[str, Any]:
        """Columns about the heads as they are now; `learning_rate` is that of the weights."""
        return {}

    def scoring_metrics(self) -> dict[str, Any]:
        """Columns beside a scoring of the validation text."""
        return {}

    def record(self) -> dict[str, Any]:
        """What a checkpoint must say so that heads can be decided from it."""
        return {"output_scaling": None, "target_sparsity": None}


class FrozenGates(NoGates):
    """The objective of fine-tuning.

    Args:
        model: the sizes after the removal.
    """

    phase = Phase.fine_tune

    def __init__(self, model: Sizes) -> None:
        super().__init__()
        self.model = model

    def step_metrics(self, draw: Draw, loss: float | Tensor) -> dict[str, Any]:
        """As in the gate phase, without what is sampled."""
        return {"lambda": 0.0, "penalty": 0.0, "loss_total": loss}

    def metrics(self, learning_rate: float) -> dict[str, Any]:
        """As in the gate phase."""
        scales = [self.model.scale(layer) for layer in range(self.model.layers)]
        return _head_metrics(self.model, self.model.heads_present, scales)


class ScheduledGates(HeadGates):
    """The objective of the gate phase, lambda by schedule. Questions as in `NoGates`.

    Args:
        config: the gates' settings.
        model: the sizes that they gate.
        seed: of the gates' noise, which depends on it and on the step alone.
    """

    phase = Phase.gates

    def __init__(self, config: GatesConfig, model: Sizes, seed: int) -> None:
        scales = [model.scale(layer) for layer in range(model.layers)]
        super().__init__(config, model.heads_present, model.heads, scales, heads_per_gate(config, model))
        self.model = model
        self.seed = seed
        self.learning_rate_ratio = config.learning_rate_ratio

    def weight(self, step: int) -> float | Tensor:
        """lambda of the update that follows `step` completed ones."""
        return lambda_at(self.config, step)

    def draw(self, step: int) -> Draw:
        """One sample of the gates, the same in every process and micro-batch."""
        gates = self.sample(generator(self.seed, "gates", step))
        opened = torch.stack([gate.detach().sum() for gate in gates]).sum()
        return Draw(self.multipliers(gates), self.weight(step), self.penalty(), opened)

    def end_step(self, step: int) -> None:
        """lambda follows the steps by itself."""

    def decided_multipliers(self) -> list[Tensor]:
        """Those of the deterministic gates."""
        return self.multipliers(self.decide())

    def step_metrics(self, draw: Draw, loss: float | Tensor) -> dict[str, Any]:
        """lambda, penalty, loss with both, and the sparsity of the sample."""
        assert isinstance(draw.penalty, Tensor)
        penalty = draw.penalty.detach()
        return {
            "lambda": draw.weight,
            "penalty": penalty,
            "loss_total": loss + draw.weight * penalty,
            "sparsity_sampled": 1 - draw.opened / self.model.heads_total,
        }

    def metrics(self, learning_rate: float) -> dict[str, Any]:
        """Of the deterministic gates."""
        gates = self.decide()
        opened = [int(gate.sum()) for gate in gates]
        scales = [float(scale) for scale in self.scales(gates)]
        rate = {"learning_rate_gates": learning_rate * self.learning_rate_ratio}
        return rate | _head_metrics(self.model, opened, scales)

    def scoring_metrics(self) -> dict[str, Any]:
        """pi by layer and original head index, and `valid_heads`, those that the scoring used."""
        row: dict[str, Any] = {}
        used = []
        pi_by_head = by_head(list(self.pi), self.heads_per_gate)
        for layer, (pi, gate) in enumerate(zip(pi_by_head, self.decide(), strict=True)):
            heads = self.model.kept(layer)
            opened = [str(head) for head, value in zip(heads, gate.tolist(), strict=True) if value]
            used.append(" ".join(opened) or "none")
            row |= {
                f"pi/layer_{layer:02d}/head_{head}": value
                for head, value in zip(heads, pi.tolist(), strict=True)
            }
        return {"valid_heads": " | ".join(used)} | row

    def record(self) -> dict[str, Any]:
        """The settings that decide beside pi."""
        return {
            "output_scaling": self.config.output_scaling,
            "target_sparsity": self.config.target_sparsity,
            "heads_per_gate": self.heads_per_gate,
            "scope": self.config.scope.value,
        }


class TargetGates(ScheduledGates):
    """The objective of the gate phase, lambda controlled to reach a target sparsity.

    The augmented Lagrangian of the constraint "expected sparsity = target" (Wang, Wohlwend, Lei 2020): the
    gradient with respect to pi is the penalty's times lambda, which is negative where too much is closed.
    """

    def missing(self, step: int) -> Tensor:
        """Sparsity that is missing to this step's target, a scalar without gradient."""
        return target_at(self.config, step) - self.expected_sparsity()

    def weight(self, step: int) -> Tensor:
        """Integral plus proportional answer to the missing sparsity."""
        return self.lagrange + self.config.lambda_max * self.config.target_gain * self.missing(step)

    def end_step(self, step: int) -> None:
        """The integral grows while sparsity is missing and falls when there is too much."""
        rate = self.config.lambda_max * 2 * self.config.target_gain / self.config.freeze_step
        self.lagrange += rate * self.missing(step)


Objective = NoGates | ScheduledGates


def learned_gates(config: GatesConfig, model: Sizes, seed: int) -> ScheduledGates:
    """The objective of the gate phase that the settings ask for."""
    kind = ScheduledGates if config.target_sparsity is None else TargetGates
    return kind(config, model, seed)


def heads_per_gate(config: GatesConfig, model: Sizes) -> int:
    """How many heads of this model a gate opens and closes.

    Raises:
        InputError: groups share a gate, but some have lost heads.
    """
    if config.unit is Unit.head:
        return 1
    share = model.heads_per_group
    for layer in range(model.layers):
        kept = model.kept(layer)
        whole = [head // share * share + i for head in kept[::share] for i in range(share)]
        if kept != whole:
            raise InputError(
                f"gates.unit=kv_group: layer {layer} has lost some heads of a group: take gates.unit=head"
            )
    return share


def unit_record(config: GatesConfig, model: Sizes) -> dict[str, Any]:
    """What a gate opens and closes, and what closing it saves of parameters and, in float32, of a cache."""
    return {"name": config.unit.value, **model.unit_costs(config.unit is Unit.kv_group)}


def lambda_at(config: GatesConfig, step: int) -> float:
    """lambda(t): linear from 0 to lambda_max over the warm-up, then constant; 0 from the freeze on."""
    if step >= config.freeze_step:
        return 0.0
    if step >= config.lambda_warmup_steps:
        return config.lambda_max
    return config.lambda_max * step / config.lambda_warmup_steps


def target_at(config: GatesConfig, step: int) -> float:
    """The target sparsity of this step: linear over the warm-up, then constant (Wang et al. 2020).

    It starts from the expected sparsity of the gates' initialization, so that the first lambda is 0.
    """
    assert config.target_sparsity is not None
    if step >= config.lambda_warmup_steps:
        return config.target_sparsity
    initial = 1 / (1 + math.exp(config.initial_pi))
    return initial + (config.target_sparsity - initial) * step / config.lambda_warmup_steps


def _head_metrics(model: Sizes, opened: Sequence[int], scales: Sequence[float]) -> dict[str, Any]:
    """Open heads and s_g of every layer, and the share of all heads that are not open."""
    row: dict[str, Any] = {}
    for layer, (heads, scale) in enumerate(zip(opened, scales, strict=True)):
        row |= {f"open_heads/layer_{layer:02d}": heads, f"s_g/layer_{layer:02d}": scale}
    return row | {"sparsity": 1 - sum(opened) / model.heads_total}
