"""Scores of heads that only a whole text has: gradient, magnitude, wanda, flap; and flap's compensation.

A token counts where its target is scored, so that what is read for the memory alone, or is padding, does not.

    h heads, dv width of a head's value, d width of the residual stream; WO^(h) is (dv, d)
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from allattn.devices import to_device
from allattn.heads.reading import TextVisitor, read
from allattn.heads.watched import Batch, HeadLayer, HeadModel

GRADIENT, MAGNITUDE, WANDA, FLAP = "gradient", "magnitude", "wanda", "flap"


class Gradients(TextVisitor):
    """Sum over the batches of |dL / d gate| at open gates, each layer's scores scaled to unit norm.

    Michel, Levy, Neubig, *Are Sixteen Heads Really Better than One?* (2019). L is a batch's summed loss, so a
    batch counts by its tokens.
    """

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        self._heads = [layer.heads for layer in layers]
        self._gates: dict[int, Tensor] = {}  # (h,) of each layer, of the pass that runs
        self._sums: dict[int, Tensor] = {}

    def reads(self, batch: Batch) -> None:
        self._gates = {}

    def z(self, layer: int, z: Tensor) -> Tensor:
        wide = z if z.dtype == torch.float64 else z.float()
        gate = wide.new_ones(z.shape[2]).requires_grad_()
        self._gates[layer] = gate
        return (wide * gate.unsqueeze(-1)).to(z.dtype)

    def has_read(self, nats: Tensor) -> None:
        gradients = torch.autograd.grad(nats.sum(), list(self._gates.values()))
        for layer, gradient in zip(self._gates, gradients, strict=True):
            self._sums[layer] = self._sums.get(layer, 0) + gradient.abs()

    def scores(self, name: str) -> list[Tensor]:
        """Per layer (h,)."""
        sums = [self._sums.get(layer, torch.zeros(heads)) for layer, heads in enumerate(self._heads)]
        return [(total / total.norm().clamp(min=torch.finfo(total.dtype).tiny)).cpu() for total in sums]


class _Counted(TextVisitor):
    """Sums over the tokens that count."""

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        self.layers = layers
        self.tokens = 0
        self._places = torch.empty(0)  # among the B * T tokens of the batch that is being read

    def reads(self, batch: Batch) -> None:
        self._places = (batch.targets.flatten() >= 0).nonzero().squeeze(1)  # on the CPU: nothing waits
        self.tokens += len(self._places)

    def counted(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (tokens, ...)."""
        self._places = to_device(self._places, x.device)
        return x.detach().flatten(0, 1)[self._places]


class Norms(_Counted):
    """Frobenius norm of each head's WO block times the mean norm of its output."""

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        super().__init__(layers)
        self._sums: dict[int, Tensor] = {}  # (h,) float64

    def z(self, layer: int, z: Tensor) -> None:
        norms = self.counted(z if z.dtype == torch.float64 else z.float()).norm(dim=-1)  # (tokens, h)
        self._sums[layer] = self._sums.get(layer, 0) + norms.sum(0, dtype=torch.float64)

    def scores(self, name: str) -> list[Tensor]:
        """Per layer (h,)."""
        found = []
        for index, layer in enumerate(self.layers):
            norms = layer.output_blocks().detach().cpu().norm(dim=(1, 2))
            total = self._sums.get(index, torch.zeros(layer.heads, dtype=torch.float64)).cpu()
            found.append(norms * (total / max(self.tokens, 1)).to(norms.dtype))
        return found


class Moments(_Counted):
    """Mean and mean square of every column of Z."""

    def __init__(self, layers: Sequence[HeadLayer]) -> None:
        super().__init__(layers)
        self._sums: dict[int, Tensor] = {}  # (2, h, dv) float64: of Z and of its square

    def z(self, layer: int, z: Tensor) -> None:
        wide = self.counted(z).double()  # (tokens, h, dv)
        self._sums[layer] = self._sums.get(layer, 0) + torch.stack([wide.sum(0), wide.square().sum(0)])

    def means(self, layer: int) -> tuple[Tensor, Tensor]:
        """(h, dv) float64 each: of Z, and of its square."""
        mean, square = self._sums[layer].cpu() / max(self.tokens, 1)
        return mean, square

    def scores(self, name: str) -> list[Tensor]:
        """Per layer (h,)."""
        of = {WANDA: wanda, FLAP: flap}[name]
        blocks = [layer.output_blocks().detach().cpu().double() for layer in self.layers]
        return [
            of(block, *self.means(index)).float() if len(block) else torch.zeros(0)
            for index, block in enumerate(blocks)
        ]


def wanda(blocks: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    """(h,): sum over the columns of Z of the mean |WO| that they meet times their root mean square.

    Sun et al., *A Simple and Effective Pruning Approach for Large Language Models* (2024).

    Args:
        blocks: (h, dv, d) WO.
        mean: (h, dv) of Z.
        square: (h, dv), mean of its square.
    """
    return (blocks.abs().mean(dim=2) * square.sqrt()).sum(dim=1)


def flap(blocks: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    """(h,): variance of every column of Z times the squared norm of its row of WO; z-scored; a head's mean.

    An et al., *Fluctuation-based Adaptive Structured Pruning for Large Language Models* (2024). The z-scores
    are over all columns of the layer. Arguments as of `wanda`.
    """
    variance = (square - mean.square()).clamp(min=0)
    columns = variance * blocks.square().sum(dim=2)  # (h, dv)
    deviation = columns.std(correction=0).clamp(min=torch.finfo(columns.dtype).tiny)
    return ((columns - columns.mean()) / deviation).mean(dim=1)


def bias_compensation(
    model: HeadModel, batches: Iterable[Batch], gates: Sequence[Tensor], memory: bool = False
) -> list[Tensor]:
    """What the heads that go wrote on average, per layer (d,) float64: added to a bias it stands in for them.

    An et al. (2024): b += mean(Z_h) WO^(h) of every head that goes.

    Args:
        model: with all heads.
        batches: a text.
        gates: per layer (h,), 0 = the head goes.
        memory: whether it is carried from one batch to the next.
    """
    moments = Moments(model.layers)
    with torch.no_grad():
        read(model, batches, [moments], memory)
    found = []
    for index, (layer, gate) in enumerate(zip(model.layers, gates, strict=True)):
        blocks = layer.output_blocks().detach().cpu().double()
        mean = moments.means(index)[0] if len(blocks) else blocks.new_zeros(blocks.shape[:2])
        gone = (gate.cpu() == 0).double().view(-1, 1)
        found.append(torch.einsum("hv,hvd->d", mean * gone, blocks))
    return found
