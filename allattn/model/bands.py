"""Which words of a segment lie in which frequency band of the vocabulary.

How many there are is in the numbers, so asking a GPU for them makes the host wait until all that is queued
there is done: once for every band of the embedding and every tail of the softmax. Who still has the words on
the CPU counts them there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BandCounts(NamedTuple):
    """How many words of a segment lie in each band."""

    inputs: list[int]  # of every band
    targets: list[int]  # of every tail, the bands after the first


def count_bands(inputs: Tensor, targets: Tensor, ends: Sequence[int]) -> BandCounts:
    """Count words on the CPU.

    Args:
        inputs: (B, T) int64.
        targets: (B, T) int64; a negative target is in no tail, one beyond the vocabulary in the last.
        ends: upper ends of the bands.
    """
    cutoffs = torch.tensor(ends[:-1], dtype=inputs.dtype)
    of_inputs, of_targets = (
        torch.bucketize(words.flatten(), cutoffs, right=True).bincount(minlength=len(ends)).tolist()
        for words in (inputs, targets)
    )
    return BandCounts(of_inputs, of_targets[1:])


def places(inside: Tensor, count: int | None) -> Tensor:
    """(n,) int64 indices at which `inside` (R,) bool holds; no wait for a GPU where `count` is n already."""
    if count is None:
        return inside.nonzero().squeeze(1)
    return torch.nonzero_static(inside, size=count).squeeze(1)
