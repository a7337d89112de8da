"""Crossings and areas of curves drawn by hand."""

import math

import pytest

from allattn.head_study.curves import Crossing, last_crossing, mean_height

# 0 .. 10 .. 20 .. 30 % of the heads; it leaves +1 twice and comes back once
CURVE = [(0.0, 10.0), (0.1, 12.0), (0.2, 10.5), (0.3, 14.5)]


@pytest.mark.parametrize(
    ("limit", "share", "reached"),
    [(11.0, 0.2 + 0.1 * 0.5 / 4, True), (10.2, 0.01, True), (12.5, 0.25, True), (14.5, 0.3, False)],
)
def test_the_last_crossing_counts(limit: float, share: float, reached: bool) -> None:
    found = last_crossing(CURVE[::-1], limit)  # in any order
    assert found.share == pytest.approx(share)
    assert found.reached == reached


def test_a_model_that_breaks_down_at_once_stays_at_its_last_whole_share() -> None:
    assert last_crossing([(0.0, 10.0), (0.1, math.inf)], 11.0) == Crossing(0.0, reached=True)


def test_areas_by_hand() -> None:
    """Trapezia of 1.1, 1.125 and 1.25."""
    assert mean_height(CURVE, 0.3) == pytest.approx((1.1 + 1.125 + 1.25) / 0.3)
    assert mean_height(CURVE, 0.25) == pytest.approx((1.1 + 1.125 + (10.5 + 12.5) / 2 * 0.05) / 0.25)
    assert mean_height([(0.0, 3.0), (0.5, 3.0)], 0.2) == pytest.approx(3.0)
