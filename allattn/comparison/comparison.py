"""Pruning runs side by side: mean and spread over seeds, differences paired by seed, the paper's too."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allattn.pruning.techniques import TECHNIQUES
from allattn.errors import InputError
from allattn.comparison.compared_run import ComparedRun, LeftOut, ModelFacts, Validation
from allattn.comparison.variants import (
    FULL,
    NONE_OF_THREE,
    mislabelled,
    reference_settings,
    unexpected_differences,
    variant_names,
    variant_order,
)

DENSE = "dense, before pruning"

# Shim et al., WikiText-103 test perplexity: parameters of the layers and perplexity of the two models, and
# the ablations' differences from the full method. lambda is 0.02 in all of them.
PAPER_DENSE = (54_566_912, 23.24)
PAPER_FULL = (30_704_640, 24.85)
PAPER_DIFFERENCES = {
    f"without {TECHNIQUES[0]}": 0.12,
    f"without {TECHNIQUES[1]}": 0.61,
    f"without {TECHNIQUES[2]}": 1.25,
    NONE_OF_THREE: 1.48,
    DENSE: round(PAPER_DENSE[1] - PAPER_FULL[1], 2),
}

# Two-sided 95 % quantiles of Student's t. Between two entries the smaller number of degrees counts, which
# makes an interval too wide rather than too narrow.
_T95 = {
    **dict(enumerate([12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228], 1)),
    **dict(enumerate([2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086], 11)),
    **{25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980},
}


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


@dataclass(frozen=True)
class MeanValidation:
    """Validation perplexity over seeds and the step of each."""

    perplexity: Mean
    steps: list[int]


@dataclass(frozen=True)
class Row:
    """One variant over its seeds."""

    variant: str
    seeds: list[int]
    sparsity: float
    heads: float  # kept, over all layers
    heads_total: int
    layer_parameters: float  # without the embedding side
    parameters: float  # with it
    test: Mean
    best: MeanValidation | None  # None for the dense model and where nothing was measured
    last: MeanValidation | None
    difference: Difference | None  # from the full method, paired by seed; None for itself and without pairs
    paper: float | None  # the paper's difference


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what there is to say about it."""

    runs: list[ComparedRun]  # by variant, then seed
    variants: list[str]  # of each run
    rows: list[Row]
    reference: dict[str, Any] | None  # the full method's settings; None where no run is of it
    left_out: list[LeftOut]
    warnings: list[str]

    def of(self, variant: str) -> list[ComparedRun]:
        """The runs of a variant, by seed."""
        return [run for run, name in zip(self.runs, self.variants, strict=True) if name == variant]

    def names(self) -> list[str]:
        """The variants in the table's order."""
        return list(dict.fromkeys(self.variants))


def compare(runs: Sequence[ComparedRun], left_out: list[LeftOut], vary: Sequence[str] = ()) -> Comparison:
    """One row per variant, the dense model and the full method first.

    Args:
        runs: finished runs, at least one.
        left_out: what to name beside them.
        vary: settings other than the gates' whose values make variants.

    Raises:
        InputError: texts, vocabularies or numbers of scored tokens differ, or two runs are of one variant and
            seed.
    """
    _refuse_mixed_texts(runs)
    by_place = dict(zip((run.where for run in runs), variant_names(runs, vary), strict=True))
    ordered = sorted(runs, key=lambda run: (variant_order(by_place[run.where]), run.seed))
    variants = [by_place[run.where] for run in ordered]
    _refuse_duplicates(ordered, variants)
    full = {
        run.seed: run.pruned.perplexity for run, name in zip(ordered, variants, strict=True) if name == FULL
    }
    comparison = Comparison(ordered, variants, [], reference_settings(runs, vary), left_out, [])
    comparison.rows.append(_dense_row(comparison, full))
    comparison.rows.extend(_row(name, comparison.of(name), full) for name in comparison.names())
    comparison.warnings.extend(_warnings(comparison, vary))
    return comparison


def mean(values: Sequence[float]) -> Mean:
    """Mean and sample standard deviation."""
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> Difference | None:
    """Mean of `values` minus `baseline` over the seeds that both have, with its 95 % interval."""
    pairs = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
    if not pairs:
        return None
    over = mean(pairs)
    half_width = math.nan
    if len(pairs) > 1:
        half_width = student_t95(len(pairs) - 1) * over.deviation / math.sqrt(len(pairs))
    return Difference(over.mean, half_width, len(pairs))


def student_t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t for 1 or more degrees of freedom."""
    known = sorted(_T95)
    return _T95[known[bisect_right(known, degrees) - 1]]


def _row(variant: str, runs: list[ComparedRun], full: dict[int, float]) -> Row:
    test = {run.seed: run.pruned.perplexity for run in runs}
    return _of_models(
        variant,
        [run.pruned for run in runs],
        list(test),
        _over_seeds([run.best_validation() for run in runs]),
        _over_seeds([run.last_validation() for run in runs]),
        None if variant == FULL else paired_difference(test, full),
    )


def _dense_row(comparison: Comparison, full: dict[int, float]) -> Row:
    """The dense models that the runs started from: one per seed, or one for all."""
    by_seed: dict[int, ModelFacts] = {}
    for run in [*comparison.of(FULL), *comparison.runs]:
        by_seed.setdefault(run.seed, run.dense)
    difference = paired_difference({seed: model.perplexity for seed, model in by_seed.items()}, full)
    models = list(by_seed.values())
    if all(_same_model(model, models[0]) for model in models):
        return _of_models(DENSE, models[:1], [], None, None, difference)
    return _of_models(DENSE, models, sorted(by_seed), None, None, difference)


def _of_models(
    variant: str,
    models: list[ModelFacts],
    seeds: list[int],
    best: MeanValidation | None,
    last: MeanValidation | None,
    difference: Difference | None,
) -> Row:
    return Row(
        variant,
        seeds,
        statistics.fmean(model.sparsity for model in models),
        statistics.fmean(model.heads for model in models),
        models[0].heads_total,
        statistics.fmean(model.layer_parameters for model in models),
        statistics.fmean(model.parameters for model in models),
        mean([model.perplexity for model in models]),
        best,
        last,
        difference,
        PAPER_DIFFERENCES.get(variant),
    )


def _same_model(one: ModelFacts, other: ModelFacts) -> bool:
    """Scored on another machine, the same model differs in the last digits."""
    return math.isclose(one.perplexity, other.perplexity, rel_tol=1e-4)


def _over_seeds(scores: Sequence[Validation | None]) -> MeanValidation | None:
    known = [score for score in scores if score is not None]
    if len(known) < len(scores):
        return None
    return MeanValidation(mean([score.perplexity for score in known]), [score.step for score in known])


def _refuse_mixed_texts(runs: Sequence[ComparedRun]) -> None:
    texts: dict[tuple[str, str, int], list[str]] = {}
    for run in runs:
        texts.setdefault(run.text, []).append(run.where)
    if len(texts) > 1:
        groups = "; ".join(
            f"{', '.join(places[:3])}{' and others' if len(places) > 3 else ''} "
            f"(vocabulary {text[0][:8]}, text {text[1][:8]}, {text[2]:,} tokens scored)"
            for text, places in texts.items()
        )
        raise InputError(
            f"the runs differ in text, vocabulary or tokens scored, so their perplexities do not compare: "
            f"{groups}; choose those of one text by runs=[FOLDER,...] or group=GROUP"
        )


def _refuse_duplicates(runs: Sequence[ComparedRun], variants: Sequence[str]) -> None:
    seen: dict[tuple[str, int], ComparedRun] = {}
    for run, variant in zip(runs, variants, strict=True):
        other = seen.setdefault((variant, run.seed), run)
        if other is not run:
            differing = [line.partition(" differs")[0] for line in unexpected_differences([other, run])]
            more = f" and {len(differing) - 3} more settings" if len(differing) > 3 else ""
            reason = f" and differ in {', '.join(differing[:3])}{more}" if differing else ""
            raise InputError(
                f"{other.where} and {run.where} are both {variant} with seed {run.seed}{reason}: choose the "
                "runs of one study by runs=[FOLDER,...] or group=GROUP, or name what makes the variants by "
                "vary=[SETTING,...]"
            )


def _warnings(comparison: Comparison, vary: Sequence[str]) -> list[str]:
    lines = unexpected_differences(comparison.runs, vary)
    if comparison.reference is None:
        lines.append("no run is of the full method, so there are no differences from it")
    lines += [
        f"{run.name} is labelled ablation={run.settings['ablation']}, but by its settings it is {variant}"
        for run, variant in zip(comparison.runs, comparison.variants, strict=True)
        if mislabelled(run)
    ]
    every = {run.seed for run in comparison.runs}
    for name in comparison.names():
        lacking = sorted(every - {run.seed for run in comparison.of(name)})
        if lacking:
            lines.append(f"{name} lacks seed {', '.join(map(str, lacking))} that other variants have")
    for seed in sorted(every):
        models = [run for run in comparison.runs if run.seed == seed]
        unlike = [run.name for run in models if not _same_model(run.dense, models[0].dense)]
        if unlike:
            lines.append(
                f"seed {seed}: {', '.join(unlike)} started from another dense model than {models[0].name}"
            )
    return lines
