"""Reading an output projection: where heads write, how strongly, and whether they cancel each other.

    h heads, dv width of a head's value, d width of the residual stream, n tokens

WO is taken in row blocks, one per head: Y = sum_h Z_h WO^(h) with blocks (h, dv, d). A row block says where
its head writes; a column says which heads feed one output (Elhage et al., *A Mathematical Framework for
Transformer Circuits*).
"""

import torch
from torch import Tensor


def block_norms(blocks: Tensor) -> Tensor:
    """(h, dv, d) -> (h,): the Frobenius norm of every head's block."""
    return blocks.flatten(1).norm(dim=1)


def effective_ranks(blocks: Tensor) -> Tensor:
    """(h, dv, d) -> (h,): exp of the entropy of a block's singular values, normalized to sum to one.

    Between 1 (one direction) and min(dv, d) (all alike); 0 of a block of zeros. Roy and Vetterli, *The
    effective rank* (2007).
    """
    values = torch.linalg.svdvals(blocks.float())  # (h, min(dv, d))
    total = values.sum(dim=1)
    shares = values / total.clamp(min=torch.finfo(values.dtype).tiny).unsqueeze(1)
    ranks = torch.special.entr(shares).sum(dim=1).exp()
    return torch.where(total > 0, ranks, 0.0)


def contributions(z: Tensor, blocks: Tensor) -> Tensor:
    """(..., h, dv) and (h, dv, d) -> (..., h, d): Z_h WO^(h) of every head."""
    return torch.einsum("...hv,hvd->...hd", z, blocks)


def cancellation(contributions: Tensor) -> Tensor:
    """(..., h, d) -> (...): norm(Y) / sum_h norm(Z_h WO^(h)), 1 where the heads pull one way.

    Y is the sum over the heads, without a bias. NaN where no head writes anything.
    """
    return contributions.sum(dim=-2).norm(dim=-1) / contributions.norm(dim=-1).sum(dim=-1)


def shares_of_output(contributions: Tensor) -> Tensor:
    """(..., h, d) -> (..., h): the length of each contribution along Y, in lengths of Y.

    The shares of a position sum to one; a head that works against the others has a negative one. NaN where Y
    is 0.
    """
    y = contributions.sum(dim=-2)  # (..., d)
    return torch.einsum("...hd,...d->...h", contributions, y) / y.square().sum(dim=-1, keepdim=True)


def cosines(vectors: Tensor) -> Tensor:
    """(h, d) -> (h, h): cosines between all pairs; 0 with a vector of zeros."""
    units = torch.nn.functional.normalize(vectors, dim=1)
    return units @ units.T


def column_view(blocks: Tensor) -> Tensor:
    """(h, dv, d) -> (h, d): how strongly each output (column of WO) reads each head, an l2 norm over dv."""
    return blocks.norm(dim=1)


def row_view(blocks: Tensor) -> Tensor:
    """(h, dv, d) -> (h, dv): how strongly each width of a head (row of WO) writes, an l2 norm over d."""
    return blocks.norm(dim=2)


def kurtosis(x: Tensor) -> Tensor:
    """(n, d) -> (): fourth standardized moment over a token's coordinates, mean over tokens.

    Gaussian coordinates have 3 (as d grows); so has, nearly, what was rotated at random. More means that the
    basis is a special one. Elhage et al., *Privileged Bases in the Transformer Residual Stream*.
    """
    centred = x.double() - x.double().mean(dim=1, keepdim=True)
    variance = centred.square().mean(dim=1)
    return (centred.pow(4).mean(dim=1) / variance.square()).mean()


def random_rotation(width: int, noise: torch.Generator) -> Tensor:
    """An orthogonal (d, d) float64 matrix, uniform over all of them."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=noise, dtype=torch.float64))
    return q * r.diagonal().sign()  # without the signs, QR's own convention shows
