"""What a head did in one sequence: a number from its attention weights, its values or its outputs Z.

    B sequences, T tokens, N' keys, h query heads, g key/value heads, dv width of a head's value, d width

Each of the seven scores of Sandoval-Segura et al. (arXiv:2504.03889) has its name there. Padding is left out,
as a query and as a key; sums are of float32 numbers, or wider ones. Norms are l2. A sequence of padding alone
gets numbers without a meaning.
"""

import torch
from torch import Tensor

from allattn.heads.watched import Attention


def awft(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average weight that the first token gets, mean_i A[i, 0]; there is no memory.

    It is alpha_1 of Gu et al., *When Attention Sink Emerges in Language Models*.
    """
    first = real.int().argmax(dim=1) + attention.memory  # (B,)
    weights = attention.weights[torch.arange(len(first), device=first.device), :, :, first]  # (B, h, T)
    return _mean(_wide(weights).mT, real)


def aeqd(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average entropy of the query distributions over all keys, in nats; 0 ln 0 = 0."""
    entropies = torch.special.entr(_wide(attention.weights)).sum(dim=-1)  # (B, h, T)
    return _mean(entropies.mT, real)


def ftvvn(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): norm of the first token's value vector; there is no memory."""
    first = real.int().argmax(dim=1) + attention.memory  # (B,)
    values = attention.values[torch.arange(len(first), device=first.device), first]  # (B, g, dv)
    return _of_query_heads(_norms(values), attention)


def avvn(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average norm of the value vectors of all keys, memory and persistent ones among them."""
    present = real.new_ones(len(real), attention.memory), real.new_ones(len(real), attention.persistent)
    keys = torch.cat([present[0], real, present[1]], dim=1)  # (B, N')
    return _of_query_heads(_mean(_norms(attention.values), keys), attention)


def lthon(z: Tensor, real: Tensor) -> Tensor:
    """(B, T, h, dv) -> (B, h): norm of the last token's head output."""
    last = real.shape[1] - 1 - real.int().flip(1).argmax(dim=1)  # (B,)
    return _norms(z[torch.arange(len(last), device=last.device), last])


def ahon(z: Tensor, real: Tensor) -> Tensor:
    """(B, T, h, dv) -> (B, h): average head output norm, mean_i norm(Z_i)."""
    return _mean(_norms(z), real)


def circuit_ahon(z: Tensor, real: Tensor, blocks: Tensor) -> Tensor:
    """(B, T, h, dv), blocks (h, dv, d) -> (B, h): average norm of the contribution, mean_i norm(Z_i WO)."""
    by_head = zip(z.unbind(2), blocks, strict=True)  # one (B, T, d) at a time
    norms = [_norms(_wide(outputs) @ _wide(block)) for outputs, block in by_head]
    return _mean(torch.stack(norms, dim=-1), real)


def mass_on_memory(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average weight of all memory together."""
    return _mass(attention, real, 0, attention.memory)


def mass_on_segment(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average weight of the sequence's own tokens together."""
    end = attention.weights.shape[-1] - attention.persistent
    return _mass(attention, real, attention.memory, end)


def mass_on_persistent(attention: Attention, real: Tensor) -> Tensor:
    """(B, h): average weight of all persistent vectors together."""
    end = attention.weights.shape[-1]
    return _mass(attention, real, end - attention.persistent, end)


def _mass(attention: Attention, real: Tensor, begin: int, end: int) -> Tensor:
    return _mean(_wide(attention.weights[..., begin:end]).sum(dim=-1).mT, real)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _norms(x: Tensor) -> Tensor:
    """(..., n) -> (...)."""
    return torch.linalg.vector_norm(_wide(x), dim=-1)


def _mean(x: Tensor, real: Tensor) -> Tensor:
    """(B, n, h) and (B, n) bool -> (B, h): over what is real; 0 where nothing is."""
    total = x.masked_fill(~real.unsqueeze(-1), 0).sum(dim=1)
    return total / real.sum(dim=1, keepdim=True).clamp(min=1)


def _of_query_heads(x: Tensor, attention: Attention) -> Tensor:
    """(B, g) -> (B, h): each query head has what its group has."""
    heads = attention.weights.shape[1]
    return x.repeat_interleave(heads // x.shape[1], dim=1) if heads else x
