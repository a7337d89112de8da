"""A small model whose heads are watched, for tests: grouped-query attention, padding on either side."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from allattn.heads.watched import Attention, Batch, Visitor

WORDS = 11


class HandMadeLayer:
    """Projections of one layer: queries (d, h, dv), keys, values (d, g, dv), WO (h, dv, d), a bias (d,)."""

    def __init__(self, noise: torch.Generator, width: int, heads: int, groups: int, head_width: int) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=noise, dtype=torch.float64) / math.sqrt(shape[0])

        self.heads, self.groups = heads, groups
        self.query = drawn(width, heads, head_width)
        self.key, self.value = drawn(width, groups, head_width), drawn(width, groups, head_width)
        self.blocks, self.bias = drawn(heads, head_width, width), drawn(width)

    def output_blocks(self) -> Tensor:
        return self.blocks

    def output_bias(self) -> Tensor:
        return self.bias


class HandMade:
    """A `HeadModel` in float64 without memory, positions or feed-forward sublayers."""

    device = torch.device("cpu")

    def __init__(self, heads: Sequence[int] = (4, 4), groups: int = 2, head_width: int = 3) -> None:
        noise, width = torch.Generator().manual_seed(5), 8
        self.table = torch.randn(WORDS, width, generator=noise, dtype=torch.float64)
        self.layers = [HandMadeLayer(noise, width, count, groups, head_width) for count in heads]
        self.visitors: list[Visitor] = []

    @contextmanager
    def watch(self, visitor: Visitor) -> Iterator[None]:
        self.visitors.append(visitor)
        try:
            yield
        finally:
            self.visitors.remove(visitor)

    def nats(self, batch: Batch, memory: Any = None) -> tuple[Tensor, None]:
        for visitor in self.visitors:
            visitor.begins(batch.real)
        x = self.table[batch.ids]
        for index, layer in enumerate(self.layers):
            if not layer.heads:
                continue
            x = x + self._layer(index, layer, x, batch.real)
            for visitor in self.visitors:
                visitor.stream(index, x)
        logits = (x @ self.table.T).transpose(1, 2)
        return F.cross_entropy(logits, batch.targets, reduction="none", ignore_index=-1), None

    def _layer(self, index: int, layer: HandMadeLayer, x: Tensor, real: Tensor) -> Tensor:
        shared, tokens = layer.heads // layer.groups, x.shape[1]
        q, k, v = (torch.einsum("btd,dhv->bthv", x, w) for w in (layer.query, layer.key, layer.value))
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() & real[:, None] & real[:, :, None]
        scores = torch.einsum("bqhv,bkhv->bhqk", q, k.repeat_interleave(shared, 2)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
        z = torch.einsum("bhqk,bkhv->bqhv", weights, v.repeat_interleave(shared, 2))
        z = z.masked_fill(~real[:, :, None, None], 9.0)  # what lies at padding is anything
        for visitor in self.visitors:
            if visitor.wants_attention:
                visitor.attention(index, Attention(weights, v, 0, 0))
            z = z if (changed := visitor.z(index, z)) is None else changed
        y = torch.einsum("bthv,hvd->btd", z, layer.blocks) + layer.bias
        for visitor in self.visitors:
            y = y if (changed := visitor.y(index, y)) is None else changed
        return y


def rows_of(*lengths: int, left: bool = False) -> Batch:
    """Random rows padded to the longest; each token but a row's first is a target."""
    noise = torch.Generator().manual_seed(8)
    longest = max(lengths)
    ids = torch.randint(WORDS, (len(lengths), longest), generator=noise)
    real, targets = torch.zeros_like(ids, dtype=torch.bool), torch.full_like(ids, -1)
    for row, length in enumerate(lengths):
        first = longest - length if left else 0
        real[row, first : first + length] = True
        targets[row, first : first + max(length - 1, 0)] = ids[row, first + 1 : first + length]
    return Batch(ids, targets, real)


def row_alone(batch: Batch, row: int) -> Batch:
    """One row without its padding."""
    real = batch.real[row]
    ids, targets = batch.ids[row, real][None], batch.targets[row, real][None]
    return Batch(ids, targets, torch.ones_like(ids, dtype=torch.bool))
