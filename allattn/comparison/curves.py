"""Perplexity against size: where a method's runs of one seed stand, and what lies between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from allattn.comparison.compared_run import ModelFacts


class At(Enum):
    """What two models must have the same of before their perplexities are compared."""

    heads = "heads"  # kept, over all layers
    parameters = "parameters"  # of the layers
    layer_time = "layer_time"  # microseconds per token in the layers


SIZE_NAMES = {
    At.heads: "heads kept",
    At.parameters: "parameters of the layers",
    At.layer_time: "layers' time per token",
}
# By this share two sizes may differ and count as one: models are built to one size to within a head or a few
# units of width, and a time is measured.
_ALIKE = {At.heads: 1e-9, At.parameters: 0.01, At.layer_time: 0.01}


def size(model: ModelFacts, at: At) -> float | None:
    """A model's size; None where its time was not measured."""
    sizes = {
        At.heads: float(model.heads),
        At.parameters: float(model.layer_parameters),
        At.layer_time: model.layer_microseconds,
    }
    return sizes[at]


def alike(one: float, other: float, at: At) -> bool:
    """Whether two sizes count as one."""
    return abs(one - other) <= _ALIKE[at] * max(one, other)


@dataclass(frozen=True)
class Curve:
    """Perplexity of models of one seed at their sizes, with straight lines between neighbours."""

    at: At
    models: tuple[tuple[float, ModelFacts], ...]  # by size

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest size."""
        return self.models[0][0], self.models[-1][0]

    def perplexity(self, asked: float) -> float | None:
        """At a size between the ends, or alike one of them; None beyond: a curve is never drawn on.

        Of models of one size, the mean counts.
        """
        low, high = self.ends
        if not low <= asked <= high and not any(alike(asked, end, self.at) for end in (low, high)):
            return None
        sizes = sorted({size for size, _ in self.models})
        values = [np.mean([m.perplexity for size, m in self.models if size == each]) for each in sizes]
        return float(np.interp(asked, sizes, values))

    def model(self, asked: float) -> ModelFacts | None:
        """The one model of that very size; None where there is none, or several."""
        found = [model for size, model in self.models if alike(asked, size, self.at)]
        return found[0] if len(found) == 1 else None


def curve(models: Iterable[ModelFacts], at: At) -> Curve | None:
    """The curve of one seed's models; None where the size of none is known."""
    sized = [(found, model) for model in models if (found := size(model, at)) is not None]
    return Curve(at, tuple(sorted(sized, key=lambda each: each[0]))) if sized else None


def ends(curves: Iterable[Curve]) -> tuple[float, float]:
    """The smallest and the largest size of any seed's models."""
    lows, highs = zip(*(each.ends for each in curves), strict=True)
    return min(lows), max(highs)


def reached_by_all(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """Sizes that every seed's curve reaches, where a run of one of them stands: perplexities of all seeds.

    Empty where the curves have no size in common.
    """
    sizes = sorted({size for each in curves for size, _ in each.models})
    found = [(size, [each.perplexity(size) for each in curves]) for size in sizes]
    return [
        (size, [value for value in values if value is not None])
        for size, values in found
        if None not in values
    ]
