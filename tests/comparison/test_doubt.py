"""Means, differences and intervals against work by hand."""

import math

import numpy as np
import pytest

from allattn.comparison.doubt import mean, paired_difference, text_interval
from allattn.record.bootstrap import perplexity_difference
from allattn.training.tally import ByArticle


def test_paired_difference_worked_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, half width 4.302653 / sqrt(3)."""
    found = paired_difference({1: 11.0, 2: 13.0, 3: 33.0, 9: 1.0}, {1: 10.0, 2: 11.0, 3: 30.0, 4: 2.0})
    assert found is not None
    assert found.pairs == 3
    assert found.mean == pytest.approx(2)
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize(
    ("pairs", "quantile"), [(2, 12.706205), (11, 2.228139), (29, 2.048407), (121, 1.979930)]
)
def test_student_quantiles_are_those_of_printed_tables(pairs: int, quantile: float) -> None:
    values = {seed: float(seed % 5) for seed in range(pairs)}
    found = paired_difference(values, dict.fromkeys(values, 0.0))
    assert found is not None
    deviation = mean(list(values.values())).deviation
    assert found.half_width == pytest.approx(quantile * deviation / math.sqrt(pairs), rel=1e-6)


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    one = paired_difference({1: 11.0}, {1: 10.0})
    assert one is not None
    assert (one.mean, one.pairs) == (1.0, 1)
    assert math.isnan(one.half_width)
    assert paired_difference({2: 11.0}, {1: 10.0}) is None


def articles(*nats: float) -> ByArticle:
    return ByArticle("articles", np.array(nats), np.full(len(nats), 10))


def test_the_text_interval_is_that_of_all_seeds_tokens_together() -> None:
    """Seed 9 has no pair; the nats of the others are added up by article."""
    ones = {1: articles(11, 12, 14), 2: articles(12, 13, 13), 9: articles(90, 90, 90)}
    others = {1: articles(10, 12, 13), 2: articles(11, 13, 14)}
    together = [
        ByArticle("articles", np.array(nats), np.full(3, 20)) for nats in ([23.0, 25, 27], [21.0, 25, 27])
    ]
    assert text_interval(ones, others) == perplexity_difference(*together)


def test_without_the_articles_of_one_text_there_is_no_interval_over_it() -> None:
    ones = {1: articles(11, 12)}
    assert text_interval(ones, {1: None}) is None
    assert text_interval(ones, {1: articles(1, 2, 3)}) is None
    assert text_interval(ones, {2: articles(11, 12)}) is None
