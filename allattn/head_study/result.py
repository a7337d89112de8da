"""What a head study has measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from allattn.head_study.reading import Reading
from allattn.heads.scores import RANDOM

ACCURACIES = ("acc", "acc_norm", "exact_match")  # metrics of tasks that are shares of right answers


class Mask(Enum):
    """Which heads are zeroed."""

    static = "static"  # the same ones always: those of the lowest mean score over the calibration text
    dynamic = "dynamic"  # anew in every sequence: those beyond a threshold from the calibration text


@dataclass(frozen=True)
class Point:
    """What is measured once."""

    mask: Mask
    score: str
    asked: float  # share of heads to zero
    seed: int | None = None  # of the random score


@dataclass(frozen=True)
class Measured:
    """What was found with a mask, or without one."""

    share: float  # of heads, really zeroed
    nats: float
    tokens: int
    tasks: Mapping[str, float] = field(default_factory=dict)  # "task metric" -> number

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens); infinite where it overflows."""
        loss = self.nats / self.tokens
        return math.exp(loss) if loss < 700 else math.inf

    @property
    def accuracies(self) -> dict[str, float]:
        """The numbers of `tasks` that are shares of right answers."""
        return {name: value for name, value in self.tasks.items() if name.split()[1] in ACCURACIES}


@dataclass(frozen=True)
class Agreement:
    """Two scores of the same heads."""

    one: str
    other: str
    spearman: float
    lowest: int  # k heads of each
    shared: int  # that are among the lowest k of both
    by_chance: float  # as many are expected to be shared


@dataclass(frozen=True)
class ClosedByGates:
    """Whether learned gates removed the heads that a score of the dense model ranks lowest."""

    score: str
    layer: int | None  # None = all layers together
    heads: int
    closed: int  # k: as many of the lowest-scored are looked at
    shared: int
    by_chance: float


@dataclass(frozen=True)
class StudyResult:
    """All of it."""

    model: str
    heads: Sequence[int]  # of each layer
    unmasked: Measured
    points: Mapping[Point, Measured]
    scores: Mapping[str, list[list[float]]]  # mean over the calibration text, layers x heads
    agreement: Sequence[Agreement]
    closed_by_gates: Sequence[ClosedByGates]
    reading: Reading | None
    settings: Mapping[str, Any]  # by dotted name
    texts: Sequence[str]  # lines on calibration and test

    def masks(self) -> list[Mask]:
        """Those that were measured."""
        return list(dict.fromkeys(point.mask for point in self.points))

    def names(self, mask: Mask) -> list[str]:
        """Scores measured under a mask; random is the last."""
        found = dict.fromkeys(point.score for point in self.points if point.mask is mask)
        return sorted(found, key=lambda name: name == RANDOM)

    def asked(self, mask: Mask) -> list[float]:
        """Shares asked for under a mask, rising."""
        return sorted({point.asked for point in self.points if point.mask is mask})

    def at(self, mask: Mask, score: str, asked: float) -> list[Measured]:
        """What was measured there: of random, a number per seed."""
        return [
            measured
            for point, measured in self.points.items()
            if (point.mask, point.score, point.asked) == (mask, score, asked)
        ]
