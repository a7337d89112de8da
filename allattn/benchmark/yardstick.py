"""The attention core as one would first write it, without regard to speed: the benchmark's "1x".

Persistent vectors and position keys are copied for every batch row, both score groups are concatenated, the
mask is built and applied to all scores, dropout is torch's, and autograd keeps what it needs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from allattn.model.cores.inputs import CoreInputs, visible
from allattn.model.cores.plain import shift


def attend_yardstick(inputs: CoreInputs) -> Tensor:
    """A core like the package's own; see `allattn.model.cores.inputs.Core`."""
    q, k, v, r, u, w, pk, pv, window, dropout, key_scale, value_scale = inputs
    batch, queries, width = q.shape[0], q.shape[1], q.shape[3]
    keys, persistent = k.shape[1], pk.shape[0]
    pk, pv = pk * key_scale, pv * value_scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, h, T or S, c)
    r, pk, pv = (x.transpose(0, 1).repeat(batch, 1, 1, 1) for x in (r.flip(0), pk, pv))  # (B, h, S or N, c)
    content = (q + u.unsqueeze(1)) @ k.mT
    position = shift((q + w.unsqueeze(1)) @ r.mT)
    scores = torch.cat([content + position, q @ pk.mT], dim=-1) / math.sqrt(width)  # (B, h, T, S + N)
    seen = visible(queries, keys, window, q.device)
    mask = torch.cat([seen, seen.new_ones(queries, persistent)], dim=-1)
    scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = F.dropout(scores.softmax(dim=-1), dropout, training=dropout > 0)
    return (probabilities @ torch.cat([v, pv.to(v.dtype)], dim=2)).transpose(1, 2)
