"""Exact scoring of a split: nats and tokens, never means of means. The only evaluation loop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM


@dataclass(frozen=True)
class Score:
    """Sum of negative log-likelihoods over the tokens scored."""

    nats: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(total nats / tokens scored); infinite where it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def score(
    model: AllAttentionLM,
    segments: Iterable[Segment],
    multipliers: list[Tensor] | None = None,
    memory_length: int | None = None,
) -> Score:
    """Score the segments in order with memory, in evaluation mode, summed over all processes.

    Args:
        model: left in the mode it was in.
        segments: evaluation rows; a negative target is not scored.
        multipliers: per layer (h,), the deterministic gates' s_g * g_i; None = no gates.
        memory_length: M in evaluation; None = the model's.
    """
    device = model.positions.table.device
    training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    memory = None
    with torch.no_grad():
        for segment in segments:
            if memory is None or segment.starts_over:
                memory = model.empty_memory(len(segment.inputs))
            targets = segment.targets.to(device)
            losses, memory = model(segment.inputs.to(device), targets, memory, multipliers, memory_length)
            nats += float(losses.double().sum())
            tokens += int((targets >= 0).sum())
    model.train(training)
    if dist.is_available() and dist.is_initialized():
        totals = torch.tensor([nats, tokens], dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        nats, tokens = float(totals[0]), int(totals[1])
    return Score(nats, tokens)
