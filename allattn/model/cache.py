"""Word after word: the projected keys and values of the last M positions of each layer.

A step projects one position and reads what is kept, so a word costs the same however long the text is. The
projected position keys are constants and kept too. The M + 1 slots are a ring: position p lies in slot
p mod (M + 1), where the oldest one falls out, and nothing is moved.

    B rows, d width, h heads present, c head width, N persistent vectors, M memory length
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from allattn.model.attention import AllAttention
from allattn.model.language_model import AllAttentionLM, Memory


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps; a step writes into the slots."""

    keys: Tensor  # (B, h, M + 1, c) by slot
    values: Tensor  # (B, h, M + 1, c) by slot
    position_keys: Tensor  # (h, M + 1, c) by distance


@dataclass
class Cache:
    """What the model keeps of a text."""

    layers: list[LayerCache]
    present: int  # position of the next word, counted from the oldest position kept at the start

    @property
    def memory_length(self) -> int:
        """M."""
        return self.layers[0].keys.shape[2] - 1

    def select(self, rows: Tensor) -> "Cache":
        """A copy with the rows `rows` (k,) int64, any of them more than once."""
        layers = [LayerCache(kept.keys[rows], kept.values[rows], kept.position_keys) for kept in self.layers]
        return Cache(layers, self.present)


@torch.no_grad()
def read(model: AllAttentionLM, ids: Tensor, memory_length: int | None = None) -> tuple[Tensor, Cache]:
    """Read the beginning of a text in segments, with the model's own forward pass.

    A position sees itself and the M before it. Without the same-length mask it does so too, where training
    let it see up to a segment more.

    Args:
        model: in evaluation mode, on any device, float32 or float64.
        ids: (B, T) int64, T at least 1.
        memory_length: M, at least 1; None = the model's.

    Returns:
        The last position's output (B, d) and the cache from which `step` goes on.

    Raises:
        InputError: the position table has fewer than M + 1 rows.
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError("reading with dropout: call model.eval() first")
    length = model.config.memory_length if memory_length is None else memory_length
    memory = model.empty_memory(len(ids))
    for segment in ids.split(length if model.config.same_length else 1, dim=1):
        hidden, memory = model.hidden(segment, memory, memory_length=length)
    return hidden[:, -1], from_memory(model, memory, length)


@torch.no_grad()
def from_memory(model: AllAttentionLM, memory: Memory, memory_length: int | None = None) -> Cache:
    """The cache from which `step` goes on after a text that was read in segments.

    Args:
        model: in evaluation mode.
        memory: after the text, at most M positions.
        memory_length: M, at least 1; None = the model's.

    Raises:
        InputError: the position table has fewer than M + 1 rows.
    """
    length = model.config.memory_length if memory_length is None else memory_length
    positions = model.positions(length + 1, length)
    layers = [_keep(layer, x, positions) for layer, x in zip(model.stack, memory, strict=True)]
    return Cache(layers, memory[0].shape[1])


@torch.no_grad()
def step(model: AllAttentionLM, ids: Tensor, cache: Cache) -> Tensor:
    """Outputs of the last layer (B, d) for the next word `ids` (B,) int64, which is added to the cache."""
    slots = cache.memory_length + 1
    slot, seen = cache.present % slots, min(cache.present + 1, slots)
    distances = (slot - torch.arange(seen, device=ids.device)) % slots  # of each slot from the new position
    x: Tensor = model.embedding(ids.unsqueeze(1)).squeeze(1)
    for layer, kept in zip(model.stack, cache.layers, strict=True):
        x = _layer_step(layer, x, kept, slot, distances)
    cache.present += 1
    return x


@torch.no_grad()
def next_log_probs(model: AllAttentionLM, hidden: Tensor) -> Tensor:
    """Log-probability of every word after the last layer's output: (B, d) -> (B, V)."""
    return model.softmax.log_probs(hidden, model.embedding)


def _keep(layer: AllAttention, memory: Tensor, positions: Tensor) -> LayerCache:
    """The cache after a layer's inputs `memory` (B, M' <= M, d); `positions` (M + 1, d) by distance."""
    normed = layer.norm(memory)
    present = memory.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, layer.head_width)).transpose(-2, -3).contiguous()

    position_keys = by_head(layer.position(positions))
    keys, values = (position_keys.new_zeros(len(memory), *position_keys.shape) for _ in range(2))
    keys[:, :, :present] = by_head(layer.key(normed))
    values[:, :, :present] = by_head(layer.value(normed))
    return LayerCache(keys, values, position_keys)


def _layer_step(layer: AllAttention, x: Tensor, kept: LayerCache, slot: int, distances: Tensor) -> Tensor:
    """`AllAttention.forward` for one new position (B, d), which goes into `slot`.

    The persistent keys' factor sqrt(c) and the scores' 1 / sqrt(c) cancel.
    """
    if not layer.heads_kept:
        return layer.after_heads(x, None)

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, layer.head_width))

    normed, seen = layer.norm(x), len(distances)
    q = by_head(layer.query(normed))  # (B, h, c)
    kept.keys[:, :, slot] = by_head(layer.key(normed))
    kept.values[:, :, slot] = by_head(layer.value(normed))
    content = torch.einsum("bhc,bhsc->bhs", q + by_head(layer.content_bias), kept.keys[:, :, :seen])
    position = torch.einsum("bhc,hsc->bhs", q + by_head(layer.position_bias), kept.position_keys[:, :seen])
    sequence = (content + position[..., distances]) / math.sqrt(layer.head_width)
    persistent = torch.einsum("bhc,nhc->bhn", q, by_head(layer.persistent_keys))
    probabilities = torch.cat([sequence, persistent], dim=-1).softmax(dim=-1)
    on_sequence, on_persistent = probabilities.split([seen, persistent.shape[-1]], dim=-1)
    z = torch.einsum("bhs,bhsc->bhc", on_sequence, kept.values[:, :, :seen])
    persistent_values = by_head(layer.persistent_values)
    z = z + torch.einsum("bhn,nhc->bhc", on_persistent, persistent_values) * math.sqrt(len(persistent_values))
    return layer.after_heads(x, z)
