"""The attention core: one softmax over the sequence and the persistent keys (Sukhbaatar et al.).

T queries, S keys in the sequence (memory first), h heads present, c head width, N persistent vectors
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from allattn.model.cores.fused import attend_fused


class Core(Protocol):
    """A function that can stand in for `attend`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        u: Tensor,
        w: Tensor,
        pk: Tensor,
        pv: Tensor,
        window: int,
        dropout: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """See `attend`."""


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(T, S) bool: query i, at position S - T + i, sees key j iff 0 <= position - j <= window."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance = position - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= window)


def shift(products: Tensor) -> Tensor:
    """(..., T, S) products with distances S-1..0 in a row -> (..., T, S) by key.

    Entry (i, j) becomes the one of distance S - T + i - j. Entries of keys after the query hold another
    row's product and must be masked.
    """
    queries, keys = products.shape[-2:]
    flat = F.pad(products, (0, 1)).flatten(-2)  # (..., T * (S + 1))
    return flat[..., queries - 1 : queries - 1 + queries * keys].unflatten(-1, (queries, keys))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    pk: Tensor,
    pv: Tensor,
    window: int,
    dropout: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Every head's output h_i = Softmax(scores) [V_i, PV_i] before the output projection.

    Args:
        q: (B, T, h, c) queries.
        k: (B, S, h, c) keys, memory first.
        v: (B, S, h, c) values.
        r: (S, h, c) projected position keys, row i for distance i.
        u: (h, c) content bias of the query.
        w: (h, c) position bias of the query (the paper's v).
        pk: (N, h, c) persistent keys, before `key_scale`.
        pv: (N, h, c) persistent values, before `value_scale`.
        window: how many positions before itself a query sees.
        dropout: probability of dropping an attention probability, on a CPU rounded to a multiple of 1/256
            below 1; 0 turns it off.
        key_scale: factor of the persistent keys in use; no copy of them is made for it.
        value_scale: factor of the persistent values in use.

    Returns:
        (B, T, h, c) in the dtype of `q`.
    """
    fused = q.device.type == "cpu" and not torch.compiler.is_compiling()
    core: Core = attend_fused if fused else attend_plain
    return core(q, k, v, r, u, w, pk, pv, window, dropout, key_scale, value_scale)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor,
    w: Tensor,
    pk: Tensor,
    pv: Tensor,
    window: int,
    dropout: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """`attend` in plain operations: any device, autograd, torch.compile."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    content = torch.einsum("bthc,bshc->hbts", q + u, k)
    flat = (q + w).permute(2, 0, 1, 3).reshape(heads, batch * queries, width)
    position = torch.bmm(flat, r.flip(0).permute(1, 2, 0)).view(heads, batch, queries, keys)
    sequence = (content + shift(position)).masked_fill(
        ~visible(queries, keys, window, q.device), float("-inf")
    )
    flat = key_scale * q.permute(2, 0, 1, 3).reshape(heads, batch * queries, width)
    persistent = torch.bmm(flat, pk.permute(1, 2, 0)).view(heads, batch, queries, len(pk))
    scores = torch.cat([sequence, persistent], dim=-1) / math.sqrt(width)
    probabilities = F.dropout(scores.softmax(dim=-1), dropout, training=dropout > 0)
    on_sequence = torch.einsum("hbts,bshc->bthc", probabilities[..., :keys], v)
    rest = probabilities[..., keys:].reshape(heads, batch * queries, len(pk))
    on_persistent = torch.bmm(rest, pv.permute(1, 0, 2)).view(heads, batch, queries, width)
    return on_sequence + value_scale * on_persistent.permute(1, 2, 0, 3)
