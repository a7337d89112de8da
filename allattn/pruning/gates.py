"""Head gates: pi, a BinConcrete draw, s_g, the expected-L0 penalty (Shim et al.; Louizos et al.).

    s = sigmoid((log u - log(1 - u) + pi) / beta), stretched to (gamma, zeta), clipped to [0, 1]
    g = 1[s >= threshold], gradient through s
    s_g = min(H / sum_i g_i, H)

The attention layer knows nothing of this: it is handed one multiplier s_g * g_i per head.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from allattn.devices import to_device
from allattn.heads.ranking import Scope, equal_counts
from allattn.pruning.config import GatesConfig, Penalty


def sample_gates(pi: Tensor, u: Tensor, config: GatesConfig) -> Tensor:
    """One hard gate in {0, 1} per head, with the gradient of its soft sample.

    Args:
        pi: (h,) gate parameters.
        u: (h,) noise in (0, 1), same device.
        config: beta, gamma, zeta, threshold.
    """
    soft = soft_sample(pi, u, config)
    hard = (soft >= config.threshold).to(soft.dtype)
    return hard + (soft - soft.detach())


def soft_sample(pi: Tensor, u: Tensor, config: GatesConfig) -> Tensor:
    """The stretched and clipped BinConcrete sample s before rounding, (h,) in [0, 1]."""
    concrete = torch.sigmoid((torch.logit(u) + pi) / config.beta)
    return (concrete * (config.zeta - config.gamma) + config.gamma).clamp(0, 1)


def decide_gates(
    pi: Sequence[Tensor], target_sparsity: float | None, scope: Scope = Scope.all_layers
) -> list[Tensor]:
    """The deterministic gates of evaluation and of the freeze, vectors like those of pi, without gradient.

    1[pi > 0]; under a target, the heads that it keeps are those of the largest pi, of all layers or of each.
    """
    if target_sparsity is None:
        return [(layer.detach() > 0).to(layer.dtype) for layer in pi]
    keep = heads_to_keep(target_sparsity, sum(map(len, pi)))
    if scope is Scope.all_layers:
        return settle_gates(pi, keep)
    counts = equal_counts(keep, [len(layer) for layer in pi])
    return [settle_gates([layer], count)[0] for layer, count in zip(pi, counts, strict=True)]


def by_head(gates: Sequence[Tensor], heads_per_gate: int) -> list[Tensor]:
    """Gates of every layer (h / n,), repeated for the n heads that share each: (h,)."""
    if heads_per_gate == 1:
        return list(gates)
    return [layer.repeat_interleave(heads_per_gate) for layer in gates]


def heads_to_keep(target_sparsity: float, heads: int) -> int:
    """The number of heads that comes nearest to a target sparsity."""
    return heads - round(target_sparsity * heads)


def output_scale(gates: Tensor, original_heads: int) -> Tensor:
    """s_g = min(H / sum_i g_i, H), a scalar; H for a layer whose gates are all closed.

    For 0/1 gates H / max(sum, 1) is the same number and has no division by zero in its gradient.
    """
    return original_heads / gates.sum().clamp(min=1)


def penalty(pi: Tensor, config: GatesConfig) -> Tensor:
    """Expected number of non-zero gates, a scalar: the sum over the heads of one layer."""
    if config.penalty is Penalty.hard:
        return torch.sigmoid(pi).sum()
    return torch.sigmoid(pi - config.beta * math.log(-config.gamma / config.zeta)).sum()


def settle_gates(pi: Sequence[Tensor], keep: int) -> list[Tensor]:
    """The deterministic gates with exactly `keep` open ones over all layers: those of the largest pi.

    Where 1[pi > 0] already opens `keep` gates this is 1[pi > 0]; else the gates nearest to pi = 0 change.
    """
    flat = torch.cat([layer.detach() for layer in pi])
    order = torch.sort(flat, descending=True, stable=True).indices
    gates = torch.zeros_like(flat)
    gates[order[:keep]] = 1
    return list(gates.split([len(layer) for layer in pi]))


class HeadGates(nn.Module):
    """The gate parameters of a model, one vector pi per layer; float32 whatever the precision.

    Sampled and decided gates are given by head, also where several heads share a gate.

    Args:
        config: the gates' settings.
        heads: number of heads present per layer.
        original_heads: H, the head count of a layer before any removal.
        constant_scales: the layers' own s_g, used where output scaling is off (1.0 in a dense model).
        heads_per_gate: heads in a row that share a gate.
    """

    def __init__(
        self,
        config: GatesConfig,
        heads: Sequence[int],
        original_heads: int,
        constant_scales: Sequence[float],
        heads_per_gate: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.original_heads = original_heads
        self.constant_scales = list(constant_scales)
        self.lagrange: Tensor  # integral of a controlled lambda; always there, so checkpoints are alike
        self.register_buffer("lagrange", torch.zeros(()))
        self.heads_per_gate = heads_per_gate
        initial = float(config.initial_pi)
        self.pi = nn.ParameterList(torch.full((count // heads_per_gate,), initial) for count in heads)

    def sample(self, noise: torch.Generator) -> list[Tensor]:
        """One draw per layer and head, hard gates with a straight-through gradient.

        `noise` is a CPU generator, so that every device and process draws the same gates.
        """
        u = torch.cat([torch.rand(pi.shape, generator=noise, dtype=torch.float64) for pi in self.pi])
        float32, pi = torch.finfo(torch.float32), self.pi[0]
        u = to_device(u.clamp(float32.tiny, 1 - float32.eps).to(pi.dtype), pi.device)  # of all layers
        by_layer = u.split([len(pi) for pi in self.pi])
        gates = [sample_gates(pi, u, self.config) for pi, u in zip(self.pi, by_layer, strict=True)]
        return by_head(gates, self.heads_per_gate)

    def decide(self) -> list[Tensor]:
        """`decide_gates` of these gates."""
        gates = decide_gates(list(self.pi), self.config.target_sparsity, self.config.scope)
        return by_head(gates, self.heads_per_gate)

    def scales(self, gates: Sequence[Tensor]) -> list[Tensor]:
        """s_g of every layer."""
        if not self.config.output_scaling:
            return [g.new_full((), s) for g, s in zip(gates, self.constant_scales, strict=True)]
        if not self.config.scale_gradient:
            gates = [g.detach() for g in gates]
        return [output_scale(g, self.original_heads) for g in gates]

    def multipliers(self, gates: Sequence[Tensor]) -> list[Tensor]:
        """What the layers are handed: s_g * g_i, one (h,) vector per layer."""
        return [s * g for s, g in zip(self.scales(gates), gates, strict=True)]

    def expected_sparsity(self) -> Tensor:
        """Expected share of closed gates, 1 - mean of sigmoid(pi), a scalar."""
        return 1 - torch.sigmoid(torch.cat(list(self.pi)).detach()).mean()

    def penalty(self) -> Tensor:
        """Sum of the penalties of all gates of all layers."""
        return torch.stack([penalty(pi, self.config) for pi in self.pi]).sum()
