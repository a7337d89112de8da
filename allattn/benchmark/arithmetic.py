"""Multiply-adds of matrix products, counted from the shapes.

B rows, T queries, S keys (memory first), h heads present, c head width, d width, N persistent vectors.
The backward pass takes two products for each of the forward pass: one per factor. Products that a backward
pass computes again count once, so a rate from these counts is of useful arithmetic only.
"""

from dataclasses import dataclass

from torch import Tensor

from allattn.model.config import ModelConfig


@dataclass(frozen=True)
class ForwardProducts:
    """Multiply-adds of one forward pass over a batch."""

    core: int  # scores and values of the attention cores
    projections: int  # q, k, v, position and output projections
    feed_forward: int
    softmax: int
    embedding: int

    @property
    def layers(self) -> int:
        """Of the stack of layers."""
        return self.core + self.projections + self.feed_forward

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.layers + self.softmax + self.embedding


def forward_products(config: ModelConfig, ids: Tensor, targets: Tensor) -> ForwardProducts:
    """Count for a segment read with a full memory.

    Scores and values are counted over all S keys, visible or not, as a product without gaps computes them.

    Args:
        config: sizes, heads kept included.
        ids: (B, T) words read.
        targets: (B, T) words predicted; each costs its own band.
    """
    rows, queries = ids.shape
    keys, c = config.memory_length + queries, config.head_width
    heads = config.heads_kept_total
    core = heads * c * rows * queries * (3 * keys + 2 * config.persistent_vectors)
    projections = heads * c * config.width * (2 * rows * queries + 2 * rows * keys + keys)
    feed_forward = config.layers * rows * queries * 2 * config.width * config.feed_forward
    return ForwardProducts(
        core, projections, feed_forward, _softmax(config, targets), _embedding(config, ids)
    )


def training_products(forward: int) -> int:
    """Forward and backward together."""
    return 3 * forward


def _band_counts(config: ModelConfig, words: Tensor) -> list[int]:
    ends = config.band_ends
    starts = [0, *ends[:-1]]
    return [int(((words >= low) & (words < high)).sum()) for low, high in zip(starts, ends, strict=True)]


def _softmax(config: ModelConfig, targets: Tensor) -> int:
    """Head projection and head for every token; projection to the band and its words for those in it."""
    width, ends = config.width, config.band_ends
    tails = len(ends) - 1
    total = targets.numel() * width * (ends[0] + tails + (width if tails else 0))
    for band, count in enumerate(_band_counts(config, targets)):
        if band:
            narrow = width // config.div**band
            total += count * narrow * (width + ends[band] - ends[band - 1])
    return total


def _embedding(config: ModelConfig, ids: Tensor) -> int:
    """The projection of each word's band to the width."""
    if not config.cutoffs:
        return 0
    widths = [config.width // config.div**band for band in range(len(config.band_ends))]
    counts = _band_counts(config, ids)
    return sum(count * width * config.width for count, width in zip(counts, widths, strict=True))
