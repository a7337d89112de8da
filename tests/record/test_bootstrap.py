"""The interval over redrawn articles: against scipy's, and by how often it holds the truth."""

import numpy as np
import pytest
from scipy import stats

from allattn.record.bootstrap import perplexity_difference
from allattn.training.tally import ByArticle


def made_up(articles: int, noise: np.random.Generator, gap: float = 0.05) -> tuple[ByArticle, ByArticle]:
    """Two models on one text: longer and shorter, harder and easier articles, hard ones hard for both."""
    tokens = noise.integers(100, 400, articles)
    hardness = noise.normal(3.0, 0.3, articles)
    nats = [tokens * (hardness + mean + noise.normal(0, 0.05, articles)) for mean in (gap, 0.0)]
    one, other = (ByArticle("articles", of_model, tokens) for of_model in nats)
    return one, other


def perplexity(articles: ByArticle) -> float:
    return float(np.exp(articles.nats.sum() / articles.tokens.sum()))


def test_equals_scipys_percentile_interval() -> None:
    one, other = made_up(60, np.random.default_rng(0))
    found = perplexity_difference(one, other)
    assert found.articles == 60
    assert found.difference == pytest.approx(perplexity(one) - perplexity(other), rel=1e-12)

    def difference(ours, theirs, tokens, axis):  # type: ignore[no-untyped-def]
        total = tokens.sum(axis)
        return np.exp(ours.sum(axis) / total) - np.exp(theirs.sum(axis) / total)

    reference = stats.bootstrap(
        (one.nats, other.nats, one.tokens),
        difference,
        n_resamples=10_000,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    # A quantile of 10,000 draws at 2.5 %: its standard error is sqrt(p (1 - p) / n) / density.
    z = stats.norm.ppf(0.975)
    error = reference.standard_error * np.sqrt(0.025 * 0.975 / 10_000) / stats.norm.pdf(z)
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=5 * np.sqrt(2) * error)
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=5 * np.sqrt(2) * error)


def test_holds_the_truth_as_often_as_it_says() -> None:
    """The truth is the difference on a text without end: exp(E[nats] / E[tokens]) of each model."""
    noise = np.random.default_rng(2)
    truth = np.exp(3.05) - np.exp(3.0)  # hardness and length are independent
    cases, held = 1_000, 0
    for seed in range(cases):
        found = perplexity_difference(*made_up(120, noise), draws=1_000, seed=seed)
        held += found.low <= truth <= found.high
    assert 0.93 <= held / cases <= 0.97


def test_the_same_draws_for_both_models_and_every_time() -> None:
    one, other = made_up(40, np.random.default_rng(3))
    first = perplexity_difference(one, other)
    assert perplexity_difference(one, other) == first
    assert perplexity_difference(one, other, seed=1) != first
    back = perplexity_difference(other, one)
    turned = [-first.difference, -first.high, -first.low]  # quantiles are interpolated from either side
    assert [back.difference, back.low, back.high] == pytest.approx(turned, rel=4 * np.finfo(float).eps)
    same = perplexity_difference(one, one)
    assert (same.difference, same.low, same.high) == (0, 0, 0)


def test_articles_without_a_scored_token_are_not_drawn() -> None:
    one, other = made_up(3, np.random.default_rng(4))
    longer = [ByArticle("articles", np.append(x.nats, 0.0), np.append(x.tokens, 0)) for x in (one, other)]
    assert perplexity_difference(*longer) == perplexity_difference(one, other)


def test_articles_of_another_text_are_refused() -> None:
    one, other = made_up(3, np.random.default_rng(5))
    with pytest.raises(ValueError, match="different texts"):
        perplexity_difference(one, ByArticle("articles", other.nats, other.tokens + 1))
