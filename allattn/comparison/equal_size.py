"""Methods at one size: each seed's curve read there, and the differences from the full method."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from allattn.comparison.compared_run import ModelFacts
from allattn.comparison.curves import At, Curve, curve, size
from allattn.comparison.doubt import Difference, Mean, mean, paired_difference, text_interval
from allattn.comparison.placed import PlacedRun
from allattn.comparison.variants import FULL
from allattn.pruning.gates import heads_to_keep
from allattn.record.bootstrap import TextInterval
from allattn.training.tally import ByArticle


@dataclass(frozen=True)
class EqualRow:
    """One method at the size that is asked for."""

    label: str
    method: str
    asked: float | None  # in units of `at`; None where nothing says which size
    curves: dict[int, Curve]  # by seed
    seeds: list[int]  # whose curve reaches that size
    test: Mean | None  # there; None where no seed reaches it
    difference: Difference | None  # from the full method; None for itself and without pairs
    text: TextInterval | None  # of that difference; None where not every pair is of two runs of that size
    full: dict[int, Curve]  # the full method's curves; empty for itself and where there is none


def method_curves(placed: Iterable[PlacedRun], at: At) -> dict[int, Curve]:
    """A method's curves by seed; a seed whose sizes are not known has none."""
    by_seed: dict[int, list[ModelFacts]] = {}
    for each in placed:
        by_seed.setdefault(each.run.seed, []).append(each.run.pruned)
    drawn = {seed: curve(models, at) for seed, models in sorted(by_seed.items())}
    return {seed: found for seed, found in drawn.items() if found is not None}


def equal_rows(placed: Sequence[PlacedRun], at: At, at_sparsity: float | None) -> list[EqualRow]:
    """A row per method, in the order of the runs; each model has a full method and a size of its own.

    Args:
        placed: the pruning runs.
        at: which size is to be equal.
        at_sparsity: see `asked_size`.
    """
    rows = []
    for model in dict.fromkeys(each.model for each in placed):
        own = [each for each in placed if each.model == model]
        asked = asked_size(own, at, at_sparsity)
        full = method_curves([each for each in own if each.method == FULL], at)
        for method in dict.fromkeys(each.method for each in own):
            group = [each for each in own if each.method == method]
            rows.append(_row(group, method_curves(group, at), {} if method == FULL else full, asked))
    return rows


def asked_size(placed: Sequence[PlacedRun], at: At, at_sparsity: float | None) -> float | None:
    """The size at which one model's methods are compared, in units of `at`; None where nothing says it.

    A sparsity becomes the whole number of heads that comes nearest; of parameters or time, what the full
    method's curves from heads to that size say on average. Without a sparsity, the mean size of the full
    method's runs, of the ones at the reference's lambda or target where there are several.
    """
    full = [each for each in placed if each.method == FULL]
    if at_sparsity is None:
        usual = [each.run.pruned for each in full if each.variant == FULL] or [
            each.run.pruned for each in full
        ]
        sizes = [found for model in usual if (found := size(model, at)) is not None]
        return statistics.fmean(sizes) if sizes else None
    heads = float(heads_to_keep(at_sparsity, placed[0].run.dense.heads_total))
    if at is At.heads:
        return heads
    sizes = []
    for drawn in method_curves(full, At.heads).values():
        known = [(kept, own) for kept, model in drawn.models if (own := size(model, at)) is not None]
        if known and known[0][0] <= heads <= known[-1][0]:
            heads_there, sizes_there = [kept for kept, _ in known], [own for _, own in known]
            sizes.append(float(np.interp(heads, heads_there, sizes_there)))
    return statistics.fmean(sizes) if sizes else None


def _row(
    group: Sequence[PlacedRun], curves: dict[int, Curve], full: dict[int, Curve], asked: float | None
) -> EqualRow:
    here, there = _read(curves, asked), _read(full, asked)
    text = None
    if asked is not None:
        text = text_interval(
            {seed: _articles(curves[seed], asked) for seed in here},
            {seed: _articles(full[seed], asked) for seed in there},
        )
    return EqualRow(
        group[0].method_label,
        group[0].method,
        asked,
        curves,
        list(here),
        mean(list(here.values())) if here else None,
        paired_difference(here, there),
        text,
        full,
    )


def _read(curves: Mapping[int, Curve], asked: float | None) -> dict[int, float]:
    """Perplexity at a size, by the seeds whose curve reaches it."""
    if asked is None:
        return {}
    found = {seed: drawn.perplexity(asked) for seed, drawn in curves.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _articles(drawn: Curve, asked: float) -> ByArticle | None:
    model = drawn.model(asked)
    return None if model is None else model.articles
