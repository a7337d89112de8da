"""Learning from the dense model beside the text: its distribution of the next word is a second target.

    loss = (1 - weight) * nats per token + weight * T^2 * KL(dense || trained),  T = temperature

    NoTeacher  the text alone: loss = nats per token
    Teacher    the dense model too (Hinton, Vinyals, Dean, *Distilling the Knowledge in a Neural Network*)

Both answer the same questions, so that training knows no difference. The divergence is that of the softmax's
first level: the first band's words and a cluster for each further band; without cutoffs, all words.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from allattn.data.segments import Segment
from allattn.model.gated import GatedLM, Memory
from allattn.model.words import words_of
from allattn.pruning.config import DistillConfig
from allattn.training.segment_memory import memory_before


class NoTeacher:
    """Learning from the text alone."""

    def __init__(self) -> None:
        self.memory: dict[int, Memory] = {}  # of the teacher, by accumulation group of streams

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute there, and so, from now on."""

    def carry_on(self, memory: dict[int, Memory]) -> None:
        """Take the memory that a checkpoint kept."""

    def losses(
        self, model: GatedLM, batch: Segment, memory: Memory, multipliers: list[Tensor] | None
    ) -> tuple[dict[str, Tensor], Memory]:
        """What a micro-batch costs, and the trained model's memory after it.

        Args:
            model: that is trained.
            batch: inputs and targets (b, T).
            memory: of `model` before it.
            multipliers: s_g * g_i, (h,) per layer; None = no gates.

        Returns:
            Scalars by column of metrics: `loss` in nats per token, and with a teacher `divergence`, the KL
            divergence per token in nats.
        """
        words = words_of(batch.inputs, batch.targets, model)
        nats, after = model(words.inputs, words.targets, memory, multipliers, counts=words.counts)
        return {"loss": nats.mean()}, after

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """What is minimized of `losses`, or of their means, a scalar."""
        return losses["loss"]


class Teacher(NoTeacher):
    """Learning from the dense model too. Questions as to `NoTeacher`.

    It is in evaluation mode, whole in every process, and reads the same streams with memory of its own, which
    is empty where its lessons begin.

    Args:
        model: dense; not trained from now on.
        config: weight and temperature.
    """

    def __init__(self, model: GatedLM, config: DistillConfig) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config = config

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Of the trained model."""
        self.model.to(device, dtype)

    def carry_on(self, memory: dict[int, Memory]) -> None:
        """The dense model's."""
        self.memory = memory

    def losses(
        self, model: GatedLM, batch: Segment, memory: Memory, multipliers: list[Tensor] | None
    ) -> tuple[dict[str, Tensor], Memory]:
        """Both models read the micro-batch."""
        inputs, targets, counts = words_of(batch.inputs, batch.targets, model)
        nats, ours, after = model.with_first_level(inputs, targets, memory, multipliers, counts)
        with torch.no_grad():
            before = memory_before(self.memory, batch, self.model)
            theirs, self.memory[batch.group] = self.model.first_level(inputs, before, counts)
        return {"loss": nats.mean(), "divergence": divergence(theirs, ours, self.config.temperature)}, after

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """T^2 keeps the gradient's size whatever the temperature."""
        weight, scale = self.config.weight, self.config.temperature**2
        return (1 - weight) * losses["loss"] + weight * scale * losses["divergence"]


def divergence(theirs: Tensor, ours: Tensor, temperature: float) -> Tensor:
    """Mean over the tokens of KL(theirs || ours), both at a temperature; a scalar in nats.

    Args:
        theirs: (B, T, C) log-probabilities of the teacher.
        ours: (B, T, C) those of the model that is trained.
        temperature: 1 leaves the distributions as they are; larger ones are flatter.
    """
    flat_theirs, flat_ours = ((logs / temperature).log_softmax(-1) for logs in (theirs, ours))
    return F.kl_div(flat_ours, flat_theirs, reduction="none", log_target=True).sum(-1).mean()
