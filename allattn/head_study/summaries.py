"""A study's curves in a few numbers: perplexity and accuracy against the share of heads really zeroed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from allattn.head_study.curves import Crossing, Curve, last_crossing, mean_height
from allattn.head_study.result import Mask, Measured, StudyResult

RISES = (0.01, 0.05, 0.10)  # of perplexity, relative
POINT = 0.01  # of accuracy, absolute


@dataclass(frozen=True)
class Quantity:
    """What is held against the share."""

    task: str | None = None  # "task metric", higher is better; None = perplexity

    @property
    def name(self) -> str:
        """In words."""
        return "perplexity" if self.task is None else self.task

    def value(self, measured: Measured) -> float:
        """Of one measurement."""
        return measured.perplexity if self.task is None else measured.tasks[self.task]

    def text(self, value: float) -> str:
        """As a table shows it."""
        return f"{value:.2f}" if self.task is None else f"{value:.4f}"

    def limits(self) -> list[str]:
        """Names of the limits at which a curve is read."""
        return ["one point"] if self.task is not None else [f"+{rise:.0%}" for rise in RISES]


def quantities(result: StudyResult) -> list[Quantity]:
    """Perplexity, and every task's accuracy."""
    return [Quantity(), *map(Quantity, result.unmasked.accuracies)]


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over seeds; NaN of one number, or where a perplexity is infinite."""
    finite = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if finite else math.nan


def curve(result: StudyResult, mask: Mask, score: str, quantity: Quantity) -> Curve:
    """Mean share and mean value (over seeds, of random) at every share asked for, the unmasked model at 0."""
    points = [(0.0, quantity.value(result.unmasked))]
    for asked in result.asked(mask):
        if found := result.at(mask, score, asked):
            shares = [each.share for each in found]
            points.append((statistics.fmean(shares), statistics.fmean(map(quantity.value, found))))
    return points


def crossings(result: StudyResult, mask: Mask, score: str, quantity: Quantity) -> list[Crossing]:
    """Up to which share the curve stays within each of the quantity's limits."""
    points = curve(result, mask, score, quantity)
    unmasked = quantity.value(result.unmasked)
    if quantity.task is not None:
        return [last_crossing([(share, -value) for share, value in points], POINT - unmasked)]
    return [last_crossing(points, unmasked * (1 + rise)) for rise in RISES]


def area(result: StudyResult, mask: Mask, score: str, quantity: Quantity) -> float:
    """Mean height of a score's curve up to the largest share that all scores of the mask reach.

    Of ln(perplexity / unmasked perplexity), in nats, or of accuracy. NaN where they reach none in common.
    """
    curves = {name: curve(result, mask, name, quantity) for name in result.names(mask)}
    end = min(max(share for share, _ in points) for points in curves.values())
    if end == 0:
        return math.nan
    if quantity.task is not None:
        return mean_height(curves[score], end)
    unmasked = result.unmasked.perplexity
    return mean_height([(share, math.log(value / unmasked)) for share, value in curves[score]], end)
