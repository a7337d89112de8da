"""Heads whose Z is zeroed: the same ones always, or in every sequence those beyond a threshold.

B sequences, T tokens, h heads of a layer, dv width of a head's value
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from allattn.devices import to_device
from allattn.heads.scores import SCORES, Inactive, SequenceScoring
from allattn.heads.watched import HeadLayer, Visitor


def threshold(score: str, values: Sequence[Tensor], share: float) -> float:
    """tau, beyond which lies `share` of the values: their quantile, interpolated linearly.

    At 1 - share where large values are inactive.

    Args:
        score: its name.
        values: of all layers, heads and sequences, in tensors of any shape; pooled.
        share: in [0, 1].
    """
    pooled = np.concatenate([layer.double().flatten().numpy() for layer in values])
    large = SCORES[score].inactive is Inactive.large
    return float(np.quantile(pooled, 1 - share if large else share))


class StaticMask(Visitor):
    """Zeroes the same heads in every sequence, at all positions.

    Args:
        gates: per layer (h,), 0 = zeroed.
    """

    def __init__(self, gates: Sequence[Tensor]) -> None:
        self._closed = [gate == 0 for gate in gates]

    @property
    def share(self) -> float:
        """Share of the model's heads that are zeroed; 0 of a model without heads."""
        closed = torch.cat([layer.cpu() for layer in self._closed])
        return float(closed.double().mean()) if len(closed) else 0.0

    def z(self, layer: int, z: Tensor) -> Tensor:
        """See `Visitor`."""
        self._closed[layer] = to_device(self._closed[layer], z.device)
        return z.masked_fill(self._closed[layer].unsqueeze(-1), 0)


class DynamicMask(SequenceScoring):
    """In every forward pass and sequence, zeroes the heads whose score lies beyond a threshold.

    The paper's (Sandoval-Segura et al.): at all positions. Scores of later layers are of what the earlier
    layers have left.

    Args:
        layers: of the model that is watched.
        score: its name; one per sequence.
        tau: from `threshold`.
        noise: of the random score.
    """

    def __init__(
        self, layers: Sequence[HeadLayer], score: str, tau: float, noise: torch.Generator | None = None
    ) -> None:
        super().__init__(layers, [score], noise)
        self._score = SCORES[score]
        self._tau = tau
        self._zeroed, self._seen = torch.zeros(2, dtype=torch.int64)  # heads of all sequences so far

    @property
    def share(self) -> float:
        """Share of the heads of all sequences so far that were zeroed; padding alone is no sequence."""
        return float(self._zeroed / self._seen.clamp(min=1))

    def z(self, layer: int, z: Tensor) -> Tensor:
        """See `Visitor`."""
        values = self.scores(layer, z)[self._score.name].float()  # (B, h), as tau was found
        inactive = values > self._tau if self._score.inactive is Inactive.large else values < self._tau
        sequences = self.real.any(dim=1, keepdim=True)  # (B, 1)
        self._zeroed = self._zeroed.to(z.device) + (inactive & sequences).sum()
        self._seen = self._seen.to(z.device) + sequences.sum() * z.shape[2]
        return z.masked_fill(inactive[:, None, :, None], 0)


HeadMask = StaticMask | DynamicMask
