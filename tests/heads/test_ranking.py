"""Which heads stay, and how far two rankings agree, by hand."""

import math
import random

import pytest
import torch

from allattn.heads.ranking import (
    Closed,
    Scope,
    closed_among_lowest,
    keep_highest,
    overlap_of_lowest,
    overlaps_by_layer,
    spearman,
)


class TestKeepHighest:
    scores = (torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.1, 0.5, 0.3]), torch.zeros(0))

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, [[0, 0, 0, 0], [0, 0, 0], []]),
            (3, [[1, 1, 1, 0], [0, 0, 0], []]),
            (5, [[1, 1, 1, 1], [0, 1, 0], []]),
            (7, [[1, 1, 1, 1], [1, 1, 1], []]),
        ],
    )
    def test_over_all_layers(self, keep: int, expected: list[list[int]]) -> None:
        gates = keep_highest(self.scores, keep, Scope.all_layers)
        assert [layer.int().tolist() for layer in gates] == expected

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, [[0, 0, 0, 0], [0, 0, 0], []]),
            (1, [[1, 0, 0, 0], [0, 0, 0], []]),
            (4, [[1, 1, 0, 0], [0, 1, 1], []]),
            (5, [[1, 1, 1, 0], [0, 1, 1], []]),
            (7, [[1, 1, 1, 1], [1, 1, 1], []]),
        ],
    )
    def test_in_each_layer(self, keep: int, expected: list[list[int]]) -> None:
        gates = keep_highest(self.scores, keep, Scope.each_layer)
        assert [layer.int().tolist() for layer in gates] == expected

    def test_equal_scores_still_give_the_number(self) -> None:
        for scope in Scope:
            gates = keep_highest([torch.zeros(4), torch.zeros(4)], 5, scope)
            assert sum(int(layer.sum()) for layer in gates) == 5


ONE = [torch.tensor([5.0, 1.0, 4.0, 9.0]), torch.tensor([2.0, 7.0]), torch.empty(0)]
OTHER = [torch.tensor([0.5, 0.1, 0.9, 0.8]), torch.tensor([0.7, 0.2]), torch.empty(0)]


def test_spearman_by_hand() -> None:
    """1 - 6 sum d^2 / n (n^2 - 1): ranks 4 1 3 6 2 5 and 3 1 6 5 4 2, squares 1 0 9 1 4 9."""
    assert spearman(ONE, OTHER) == pytest.approx(1 - 6 * 24 / (6 * 35))
    assert spearman(ONE, [layer * 2 for layer in ONE]) == pytest.approx(1)
    assert math.isnan(spearman(ONE, [torch.ones(4), torch.ones(2), torch.empty(0)]))


def test_overlap_of_the_lowest() -> None:
    """Three lowest of each: places 1 4 2 and 1 5 0."""
    assert overlap_of_lowest(ONE, OTHER, 3) == (1, 9 / 6)
    assert overlap_of_lowest(ONE, ONE, 3) == (3, 9 / 6)
    assert overlap_of_lowest(ONE, OTHER, 0) == (0, 0)
    assert overlaps_by_layer(ONE, OTHER, 3) == [(1, 2 * 2 / 4), (0, 1 * 1 / 2), (0, 0)]


def test_overlap_by_chance_is_what_chance_gives() -> None:
    draw = random.Random(1)
    shared = [len({*draw.sample(range(9), 4)} & {*draw.sample(range(9), 4)}) for _ in range(4000)]
    _, by_chance = overlap_of_lowest([torch.rand(9)], [torch.rand(9)], 4)
    assert by_chance == pytest.approx(sum(shared) / 4000, abs=4 * 0.9 / 4000**0.5)


def test_what_gates_closed_among_the_lowest() -> None:
    """Layer 0 lost 1 and 3, its lowest are 1 and 2; layer 1 lost 4 of all. Of the model 1 4 2 are lowest."""
    assert closed_among_lowest(ONE, [[1, 3], [0], []]) == [
        Closed(0, heads=4, closed=2, shared=1, by_chance=1.0),
        Closed(1, heads=2, closed=1, shared=1, by_chance=0.5),
        Closed(2, heads=0, closed=0, shared=0, by_chance=0.0),
        Closed(None, heads=6, closed=3, shared=2, by_chance=1.5),
    ]
