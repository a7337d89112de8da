"""The attention core in plain operations: any device, autograd, torch.compile.

One softmax over the sequence and the persistent keys (Sukhbaatar et al.).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from allattn.model.cores.inputs import CoreInputs, visible


def shift(products: Tensor) -> Tensor:
    """(..., T, S) products with distances S-1..0 in a row -> (..., T, S) by key.

    Entry (i, j) becomes the one of distance S - T + i - j. Entries of keys after the query hold another
    row's product and must be masked.
    """
    queries, keys = products.shape[-2:]
    flat = F.pad(products, (0, 1)).flatten(-2)  # (..., T * (S + 1))
    return flat[..., queries - 1 : queries - 1 + queries * keys].unflatten(-1, (queries, keys))


def attention_weights(inputs: CoreInputs) -> Tensor:
    """Softmax over the sequence and the persistent keys, (h, B, T, S + N), before dropout."""
    q, k, _, r, u, w, pk, _, window, _, key_scale, _ = inputs
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
    return scores.softmax(dim=-1)


def attend_plain(inputs: CoreInputs) -> Tensor:
    """A core that keeps the probabilities for the backward pass; see `Core`."""
    v, pv, dropout = inputs.v, inputs.pv, inputs.dropout
    probabilities = F.dropout(attention_weights(inputs), dropout, training=dropout > 0)
    batch, queries, heads, width = inputs.q.shape
    keys = v.shape[1]
    on_sequence = torch.einsum("hbts,bshc->bthc", probabilities[..., :keys], v)
    rest = probabilities[..., keys:].reshape(heads, batch * queries, len(pv))
    on_persistent = torch.bmm(rest, pv.permute(1, 0, 2)).view(heads, batch, queries, width)
    return on_sequence + inputs.value_scale * on_persistent.permute(1, 2, 0, 3)
