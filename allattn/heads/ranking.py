"""From numbers of heads to heads that stay, and how far two rankings agree.

A ranking is `importance` of a score: per layer (h,), and the lowest heads do least.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class Scope(Enum):
    """Among which heads is chosen."""

    all_layers = "all_layers"
    each_layer = "each_layer"  # the same number in every layer, as nearly as it divides


class Overlap(NamedTuple):
    """Heads that two choices share."""

    shared: int
    by_chance: float  # expected of two choices of as many heads at random


class Closed(NamedTuple):
    """The heads that a pruned model lacks, held against as many of the lowest of a ranking."""

    layer: int | None  # None = chosen among all layers together
    heads: int
    closed: int
    shared: int
    by_chance: float


def keep_highest(scores: Sequence[Tensor], keep: int, scope: Scope) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer, that keep the `keep` highest-scored heads.

    Each layer keeps the same number where the scope is `each_layer`; what does not divide goes to the first
    layers, and a layer keeps at most what it has.
    """
    if scope is Scope.all_layers:
        flat = torch.cat(list(scores))
        gates = torch.zeros_like(flat)
        gates[torch.sort(flat, descending=True, stable=True).indices[:keep]] = 1
        return list(gates.split([len(layer) for layer in scores]))
    counts = equal_counts(keep, [len(layer) for layer in scores])
    return [
        keep_highest([layer], count, Scope.all_layers)[0] for layer, count in zip(scores, counts, strict=True)
    ]


def equal_counts(keep: int, present: Sequence[int]) -> list[int]:
    """`keep` shared out evenly over the layers; what does not divide goes to the first ones."""
    counts = [0] * len(present)
    while sum(counts) < min(keep, sum(present)):
        for layer, most in enumerate(present):
            if counts[layer] < most and sum(counts) < keep:
                counts[layer] += 1
    return counts


def spearman(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Rank correlation of two rankings of the same heads; NaN where one of them is constant."""
    from scipy import stats  # takes a second or more, and a training run needs none of it

    rankings = _flat(one), _flat(other)
    if any(len(ranking.unique()) < 2 for ranking in rankings):
        return math.nan
    return float(stats.spearmanr(*rankings).statistic)


def overlap_of_lowest(one: Sequence[Tensor], other: Sequence[Tensor], lowest: int) -> Overlap:
    """How many of the `lowest` heads of two rankings are the same.

    By chance it is the mean of a hypergeometric distribution, lowest^2 / heads.
    """
    first, second = _lowest(_flat(one), lowest), _lowest(_flat(other), lowest)
    return Overlap(len(first & second), _by_chance(lowest, len(_flat(one))))


def overlaps_by_layer(one: Sequence[Tensor], other: Sequence[Tensor], lowest: int) -> list[Overlap]:
    """Of every layer, how many of its heads are among the `lowest` of the model in both rankings.

    By chance: of two choices of as many heads of the layer as each ranking has there.
    """
    sizes = [len(layer) for layer in one]
    gates = [
        [gate == 0 for gate in keep_highest(ranking, sum(sizes) - lowest, Scope.all_layers)]
        for ranking in (one, other)
    ]
    return [
        Overlap(int((a & b).sum()), int(a.sum()) * int(b.sum()) / max(size, 1))
        for a, b, size in zip(*gates, sizes, strict=True)
    ]


def closed_among_lowest(ranking: Sequence[Tensor], closed: Sequence[Sequence[int]]) -> list[Closed]:
    """Whether a pruning closed the heads that a ranking of the dense model's calls inactive.

    Args:
        ranking: of the dense model.
        closed: of each layer, the heads that the pruned model lacks.

    Returns:
        One per layer, as many of its lowest as it has closed heads; then one of all layers together.
    """
    rows = []
    for layer, (values, gone) in enumerate(zip(ranking, closed, strict=True)):
        shared = len(_lowest(values, len(gone)) & set(gone))
        rows.append(Closed(layer, len(values), len(gone), shared, _by_chance(len(gone), len(values))))
    starts = [sum(len(layer) for layer in ranking[:index]) for index in range(len(ranking))]
    every = {start + head for start, gone in zip(starts, closed, strict=True) for head in gone}
    heads = _flat(ranking)
    shared = len(_lowest(heads, len(every)) & every)
    return [*rows, Closed(None, len(heads), len(every), shared, _by_chance(len(every), len(heads)))]


def _flat(ranking: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(ranking))


def _lowest(values: Tensor, count: int) -> set[int]:
    """Places of the `count` heads that `keep_highest` would not keep."""
    (gate,) = keep_highest([values], len(values) - count, Scope.all_layers)
    return set((gate == 0).nonzero().flatten().tolist())


def _by_chance(chosen: int, heads: int) -> float:
    return chosen * chosen / max(heads, 1)
