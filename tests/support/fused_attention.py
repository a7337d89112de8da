"""torch's own attention calls put to the All-attention core's work, for evaluation: measured, not used.

Both take one group of keys: memory and segment first, the persistent ones after them. What a query has in
common with a key's distance becomes a bias of the score; the content bias u adds the key's own u k to it.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from allattn.model.cores.inputs import CoreInputs, visible
from allattn.model.cores.plain import shift


def attend_sdpa(inputs: CoreInputs) -> Tensor:
    """`scaled_dot_product_attention`, which wants the bias of every score (B, h, T, S + N)."""
    query, key, value = _one_group(inputs)
    positions, own = _biases(inputs)
    seen = visible(query.shape[2], inputs.k.shape[1], inputs.window, query.device)
    bias = (shift(positions) + own.unsqueeze(2)).masked_fill(~seen, -math.inf)
    bias = F.pad(bias, (0, len(inputs.pk)))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2)


def attend_flex(inputs: CoreInputs) -> Tensor:
    """`flex_attention`, compiled, which reads the biases while it computes a score."""
    query, key, value = _one_group(inputs)
    positions, own = _biases(inputs)
    queries, keys = query.shape[2], inputs.k.shape[1]

    def biased(score: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sequence = j < keys
        place = torch.where(sequence, j - i + queries - 1, 0).clamp(0, keys - 1)
        bias = positions[row, head, i, place] + own[row, head, torch.where(sequence, j, 0)]
        return score + torch.where(sequence, bias, 0.0)

    mask = _block_mask(queries, keys, len(inputs.pk), inputs.window, query.device)
    found: Tensor = _compiled()(query, key, value, score_mod=biased, block_mask=mask)
    return found.transpose(1, 2)


def _one_group(inputs: CoreInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, h, T, c), keys and values (B, h, S + N, c)."""
    shape = (len(inputs.q), -1, -1, -1)
    key = torch.cat([inputs.k, (inputs.key_scale * inputs.pk).expand(shape)], 1)
    value = torch.cat([inputs.v, (inputs.value_scale * inputs.pv).expand(shape)], 1)
    return inputs.q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _biases(inputs: CoreInputs) -> tuple[Tensor, Tensor]:
    """Of distances S-1..0 (B, h, T, S), and of the keys themselves (B, h, S)."""
    scale = 1 / math.sqrt(inputs.q.shape[-1])
    positions = torch.einsum("bthc,shc->bhts", inputs.q + inputs.w, inputs.r.flip(0))
    return positions * scale, torch.einsum("hc,bshc->bhs", inputs.u, inputs.k) * scale


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask(queries: int, keys: int, persistent: int, window: int, device: torch.device) -> BlockMask:
    def seen(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = keys - queries + i - j
        return (j >= keys) | ((distance >= 0) & (distance <= window))

    return create_block_mask(seen, None, None, queries, keys + persistent, device=device)
