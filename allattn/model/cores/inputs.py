"""What an attention core gets, and which keys a query sees.

B rows, T queries, S keys in the sequence (memory first), h heads present, c head width, N persistent vectors
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class CoreInputs(NamedTuple):
    """One layer's projections by head, and how they are to be put together."""

    q: Tensor  # (B, T, h, c) queries
    k: Tensor  # (B, S, h, c) keys
    v: Tensor  # (B, S, h, c) values
    r: Tensor  # (S, h, c) projected position keys, row i for distance i
    u: Tensor  # (h, c) content bias of the query
    w: Tensor  # (h, c) position bias of the query (the paper's v)
    pk: Tensor  # (N, h, c) persistent keys, before `key_scale`
    pv: Tensor  # (N, h, c) persistent values, before `value_scale`
    window: int  # how many positions before itself a query sees
    dropout: float  # probability of dropping an attention probability; 0 turns it off
    key_scale: float = 1.0  # factor of the persistent keys in use; no copy of them is made for it
    value_scale: float = 1.0  # factor of the persistent values in use

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, r, u, w, pk, pv."""
        return self[:8]

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """window, dropout, key_scale, value_scale."""
        return self[8:]


# Gives every head's output h_i = Softmax(scores) [V_i, PV_i], (B, T, h, c) in the dtype of q.
Core = Callable[[CoreInputs], Tensor]


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(T, S) bool: query i, at position S - T + i, sees key j iff 0 <= position - j <= window."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance = position - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= window)
