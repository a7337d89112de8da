"""How much of the difference between two models is luck of the text: a paired bootstrap over articles."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allattn.training.tally import ByArticle

DRAWS = 10_000
CONFIDENCE = 0.95
_AT_ONCE = 2**20  # articles drawn at a time

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TextInterval:
    """A difference of perplexities, and the interval that 95 % of the redrawn texts give."""

    difference: float
    low: float
    high: float
    articles: int


def perplexity_difference(
    one: ByArticle, other: ByArticle, draws: int = DRAWS, seed: int = 0
) -> TextInterval:
    """Perplexity of `one` minus that of `other`, on one text.

    Articles are drawn with replacement, as many as the text has and for both models the same, `draws` times;
    a perplexity is exp(nats / tokens) over all that were drawn. The interval goes from the 2.5 % to the
    97.5 % quantile of the differences (percentile method, Efron and Tibshirani 1993, chapter 13). It needs
    many articles: with fewer than about thirty it is too narrow.

    Args:
        one: of the text.
        other: of the same text.
        draws: redrawn texts.
        seed: of the draws.

    Raises:
        ValueError: the articles are not the same.
    """
    if not np.array_equal(one.tokens, other.tokens):
        raise ValueError("the articles of two different texts, or of one in two vocabularies")
    sums = np.stack([one.nats, other.nats, one.tokens])[:, one.tokens > 0]  # (3, a)
    articles = sums.shape[1]
    noise = np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // articles)
    found = []
    for start in range(0, draws, at_once):
        drawn = noise.integers(articles, size=(min(at_once, draws - start), articles))
        found.append(_difference(sums[:, drawn].sum(axis=-1)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(found), [tail, 1 - tail])
    return TextInterval(float(_difference(sums.sum(axis=-1))), float(low), float(high), articles)


def _difference(sums: Floats) -> Floats:
    """Of perplexities, from nats of both and tokens (3, ...)."""
    one, other, tokens = sums
    return np.exp(one / tokens) - np.exp(other / tokens)
