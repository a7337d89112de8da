"""How sure a mean and a difference are: over seeds (Student's t), and over the text (paired bootstrap)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from allattn.record.bootstrap import TextInterval, perplexity_difference
from allattn.training.tally import ByArticle

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over runs and, of two or more, the standard deviation (n - 1); NaN of one."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class Difference:
    """Mean difference of pairs and half the width of its 95 % interval (Student's t); NaN of one pair."""

    mean: float
    half_width: float
    pairs: int


def mean(values: Sequence[float]) -> Mean:
    """Mean and sample standard deviation."""
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Mean of `values` minus `baseline` over the seeds that both have, with its 95 % interval."""
    pairs = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
    if not pairs:
        return None
    over = mean(pairs)
    half_width = math.nan
    if len(pairs) > 1:
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1))
        half_width = quantile * over.deviation / math.sqrt(len(pairs))
    return Difference(over.mean, half_width, len(pairs))


def text_interval(
    values: Mapping[int, ByArticle | None], baseline: Mapping[int, ByArticle | None]
) -> TextInterval | None:
    """Difference of perplexity over the seeds that both have, with its 95 % interval over the text.

    The perplexity is that of all these seeds' tokens together, the geometric mean of the seeds'. None where
    no seed is in both, or where one of these runs has not kept the nats of the same articles.
    """
    ones = [values[seed] for seed in values if seed in baseline]
    others = [baseline[seed] for seed in values if seed in baseline]
    known = [articles for articles in (*ones, *others) if articles is not None]
    if not known or len(known) < len(ones) + len(others):
        return None
    if not all(np.array_equal(articles.tokens, known[0].tokens) for articles in known):
        return None
    return perplexity_difference(_together(known[: len(ones)]), _together(known[len(ones) :]))


def _together(runs: Sequence[ByArticle]) -> ByArticle:
    """Nats and tokens of several runs on one text, added up by article."""
    nats, tokens = (np.sum([getattr(run, of) for run in runs], axis=0) for of in ("nats", "tokens"))
    return ByArticle(runs[0].unit, nats, tokens)
