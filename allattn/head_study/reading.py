"""Reading every layer's output projection on a text, and what becomes of the model without it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allattn.heads.output_projection import (
    block_norms,
    cancellation,
    column_view,
    contributions,
    cosines,
    effective_ranks,
    kurtosis,
    random_rotation,
    row_view,
    shares_of_output,
)
from allattn.heads.watched import Batch, HeadModel, Visitor
from allattn.randomness import generator


@dataclass(frozen=True)
class LayerReading:
    """One layer's; numbers by head are of its heads in order."""

    layer: int
    block_norms: list[float]
    effective_ranks: list[float]
    shares_of_output: list[float]  # mean over the text's tokens
    cancellation: float  # mean over the text's tokens
    cosines: list[list[float]]  # of the heads' mean contributions
    kurtosis: float  # of the residual stream as it leaves the layer
    rotated_kurtosis: float  # of the same after a random rotation
    zero_perplexity: float | None = None  # of the test text where the layer's heads write nothing
    identity_perplexity: float | None = None  # where Y = Z; only where h * dv = d
    masses: dict[str, list[float]] = field(default_factory=dict)  # mean attention on each kind of keys


@dataclass(frozen=True)
class Reading:
    """All layers with heads, and two views of one of them."""

    layers: list[LayerReading]
    viewed: int
    columns: list[list[float]]  # heads x d: how strongly each output reads each head
    rows: list[list[float]]  # heads x dv: how strongly each width of a head writes


class _Projections(Visitor):
    """Sums over the tokens of a text; nothing grows with its length."""

    def __init__(self, model: HeadModel, seed: int) -> None:
        self._real = torch.empty(0)  # (B, T) of the pass that runs
        self.tokens = 0
        self._blocks = [layer.output_blocks().detach().float() for layer in model.layers]
        layers = len(self._blocks)
        self.cancellation = [0.0] * layers
        self.shares: list[Tensor | float] = [0.0] * layers  # (h,)
        self.written: list[Tensor | float] = [0.0] * layers  # (h, d)
        self.kurtosis = [0.0] * layers
        self.rotated = [0.0] * layers
        width = next(blocks.shape[2] for blocks in self._blocks if len(blocks))
        self._rotation = random_rotation(width, generator(seed, "rotation of the residual stream"))

    def begins(self, real: Tensor) -> None:
        self._real = real
        self.tokens += int(real.sum())

    def z(self, layer: int, z: Tensor) -> None:
        by_head = contributions(z[self._real.to(z.device)].float(), self._blocks[layer])  # (n, h, d)
        self.cancellation[layer] += float(cancellation(by_head).nan_to_num(1.0).double().sum())
        self.shares[layer] += shares_of_output(by_head).nan_to_num(0.0).double().sum(0).cpu()
        self.written[layer] += by_head.double().sum(0).cpu()

    def stream(self, layer: int, x: Tensor) -> None:
        tokens = x[self._real.to(x.device)].double()  # (n, d)
        self.kurtosis[layer] += float(kurtosis(tokens)) * len(tokens)
        self.rotated[layer] += float(kurtosis(tokens @ self._rotation.to(tokens))) * len(tokens)


class ZeroOutput(Visitor):
    """The heads of one layer write nothing, its bias included."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def y(self, layer: int, y: Tensor) -> Tensor | None:
        return torch.zeros_like(y) if layer == self._layer else None


class IdentityOutput(Visitor):
    """Y = Z in one layer whose h * dv is d: what the heads found is not projected."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._z: Tensor | None = None

    def z(self, layer: int, z: Tensor) -> None:
        if layer == self._layer:
            self._z = z

    def y(self, layer: int, y: Tensor) -> Tensor | None:
        if layer != self._layer:
            return None
        assert self._z is not None
        return self._z.flatten(-2)  # (B, T, h, dv) -> (B, T, d)


def read_projections(
    model: HeadModel, batches: Iterable[Batch], memory: bool, viewed: int, seed: int
) -> Reading:
    """Everything but the perplexities.

    Args:
        model: its residual stream has one width.
        batches: a text.
        memory: whether it is carried from one batch to the next.
        viewed: the layer whose columns and rows are shown; it has heads.
        seed: of the rotation.
    """
    visitor = _Projections(model, seed)
    before = None
    with torch.no_grad(), model.watch(visitor):
        for batch in batches:
            _, after = model.nats(batch, before)
            before = after if memory else None
    layers, tokens = [], visitor.tokens
    for index, layer in enumerate(model.layers):
        if not layer.heads:
            continue
        blocks = layer.output_blocks().detach().float()
        layers.append(
            LayerReading(
                index,
                block_norms(blocks).tolist(),
                effective_ranks(blocks).tolist(),
                (torch.as_tensor(visitor.shares[index]) / tokens).tolist(),
                visitor.cancellation[index] / tokens,
                cosines(torch.as_tensor(visitor.written[index])).tolist(),
                visitor.kurtosis[index] / tokens,
                visitor.rotated[index] / tokens,
            )
        )
    blocks = model.layers[viewed].output_blocks().detach().float()
    return Reading(layers, viewed, column_view(blocks).tolist(), row_view(blocks).tolist())


def ablations(model: HeadModel, layer: int) -> dict[str, Visitor]:
    """The ways in which a layer's projection can be taken away, by name; identity only where h * dv = d."""
    heads, width, stream = model.layers[layer].output_blocks().shape
    found: dict[str, Visitor] = {"zero": ZeroOutput(layer)}
    if heads * width == stream:
        found["identity"] = IdentityOutput(layer)
    return found
