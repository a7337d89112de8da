"""The study: scores of a calibration text, then what a test text costs with more and more heads zeroed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.head_study.config import StudyConfig, chosen_scores
from allattn.head_study.reading import LayerReading, Reading, ablations, read_projections
from allattn.head_study.record import Record
from allattn.head_study.result import Agreement, ClosedByGates, Mask, Measured, Point, StudyResult
from allattn.head_study.subject import Subject, score_text
from allattn.heads.masks import DynamicMask, StaticMask, threshold
from allattn.heads.ranking import Scope, closed_among_lowest, keep_highest, overlap_of_lowest, spearman
from allattn.heads.scores import MASSES, RANDOM, SCORES, importance, sequence_scores, text_scores
from allattn.heads.watched import Visitor
from allattn.randomness import generator
from allattn.training.display import watched

Scores = Mapping[str, Sequence[Tensor]]


class Study:
    """One subject's measurements, each made once and kept in a record.

    Args:
        subject: model and texts.
        settings: checked.
        record: what earlier starts have measured is taken from it.
        progress: show bars or lines on standard error.

    Raises:
        InputError: the model has no heads, or none in the layer whose projection is to be shown.
    """

    def __init__(self, subject: Subject, settings: StudyConfig, record: Record, progress: bool) -> None:
        self.subject = subject
        self.settings = settings
        self.record = record
        self.progress = progress
        self.names = chosen_scores(settings, subject.calibration.memory)
        with_heads = [layer for layer, heads in enumerate(subject.heads) if heads]
        if not with_heads:
            raise InputError(f"{subject.name}: has no heads to study")
        if settings.output.read and settings.output.layer not in with_heads:
            layers = ", ".join(map(str, with_heads))
            raise InputError(
                f"output.layer={settings.output.layer}: has no heads; layers that have: {layers}"
            )

    def run(self, closed: Sequence[Sequence[int]] | None, settings: Mapping[str, Any]) -> StudyResult:
        """Measure what is missing.

        Args:
            closed: of each layer, the heads that learned gates removed; None = no such model is given.
            settings: by name, to be shown.
        """
        by_sequence, by_text = self._scores()
        unmasked = self._measured({"mask": "none"}, lambda: None)
        points = watched(self._points(), "zeroing heads", self.progress)
        found = {point: self._point(point, by_sequence, by_text) for point in points}
        ranked = {name: importance(name, layers) for name, layers in by_text.items()}
        closed_by_gates = [
            ClosedByGates(name, *of_layer)
            for name, layers in ranked.items()
            for of_layer in (closed_among_lowest(layers, closed) if closed is not None else ())
        ]
        return StudyResult(
            self.subject.name,
            self.subject.heads,
            unmasked,
            found,
            {name: [layer.tolist() for layer in layers] for name, layers in by_text.items()},
            agreements(ranked, self.settings.agreement),
            closed_by_gates,
            self._reading() if self.settings.output.read else None,
            settings,
            [f"calibration: {self.subject.calibration.said}", f"test: {self.subject.test.said}"],
        )

    def _points(self) -> list[Point]:
        """Every combination that has a meaning, random at each of its seeds."""
        found = []
        for mask in dict.fromkeys(self.settings.mask):
            for name in self.names:
                if mask is Mask.dynamic and not SCORES[name].per_sequence:
                    continue
                seeds = range(self.settings.random_seeds) if name == RANDOM else [None]
                shares = sorted(set(self.settings.share))
                found += [Point(mask, name, share, seed) for share in shares for seed in seeds]
        return found

    def _scores(self) -> tuple[Scores, Scores]:
        """Of every sequence, per layer (n, h), those scores that have this; of the text, per layer (h,)."""
        wanted = [name for name in self.names if name != RANDOM]
        kept = {name: self.record.get({"score": name}) for name in wanted}
        text, model = self.subject.calibration, self.subject.model
        for measure, per_sequence in ((sequence_scores, True), (text_scores, False)):
            missing = [n for n in wanted if kept[n] is None and SCORES[n].per_sequence is per_sequence]
            if not missing:
                continue
            batches = watched(text.batches(), "scoring heads", self.progress)
            for name, layers in measure(model, batches, missing, text.memory).items():
                kept[name] = {"layers": [layer.tolist() for layer in layers]}
                self.record.add({"score": name}, kept[name] or {})
        found = {name: [torch.tensor(layer) for layer in (kept[name] or {})["layers"]] for name in wanted}
        by_sequence = {name: layers for name, layers in found.items() if SCORES[name].per_sequence}
        means = {name: [layer.mean(dim=0) for layer in layers] for name, layers in by_sequence.items()}
        return by_sequence, {name: means.get(name, found[name]) for name in wanted}

    def _point(self, point: Point, by_sequence: Scores, by_text: Scores) -> Measured:
        what = {**asdict(point), "mask": point.mask.value}
        return self._measured(what, lambda: self._mask(point, by_sequence, by_text))

    def _mask(self, point: Point, by_sequence: Scores, by_text: Scores) -> StaticMask | DynamicMask:
        heads, seed = self.subject.heads, point.seed
        noise = None if seed is None else generator(self.settings.seed, "random heads", seed)
        if point.mask is Mask.dynamic:
            # Uniform scores have their quantiles without a measurement.
            tau = point.asked if noise else threshold(point.score, by_sequence[point.score], point.asked)
            return DynamicMask(self.subject.model.layers, point.score, tau, noise)
        if noise is None:
            ranked = importance(point.score, by_text[point.score])
        else:
            ranked = [torch.rand(count, generator=noise) for count in heads]
        keep = sum(heads) - round(point.asked * sum(heads))
        return StaticMask(keep_highest(ranked, keep, Scope.all_layers))

    def _measured(
        self, what: Mapping[str, Any], mask: Callable[[], StaticMask | DynamicMask | None]
    ) -> Measured:
        """Perplexity and tasks through a mask, from the record where it has them."""
        if (kept := self.record.get(what)) is not None:
            return Measured(**kept)
        visitor = mask()
        nats, tokens = self._scored(visitor or Visitor())
        share = 0.0 if visitor is None else visitor.share  # of the text, before any task
        found = Measured(share, nats, tokens, dict(self.subject.run_tasks(visitor or Visitor())))
        self.record.add(what, asdict(found))
        return found

    def _scored(self, visitor: Visitor) -> tuple[float, int]:
        """Nats and tokens of the test text under a visitor."""
        with self.subject.model.watch(visitor):
            return score_text(self.subject.model, self.subject.test)

    def _reading(self) -> Reading:
        viewed, seed = self.settings.output.layer, self.settings.seed
        what = {"reading": viewed}
        kept = self.record.get(what)
        if kept is None:
            text, model = self.subject.calibration, self.subject.model
            batches = watched(text.batches(), "reading WO", self.progress)
            kept = asdict(read_projections(model, batches, text.memory, viewed, seed))
            if self.subject.several_kinds:
                batches = watched(text.batches(), "reading attention", self.progress)
                masses = text_scores(model, batches, MASSES, text.memory)
                for layer in kept["layers"]:
                    of_layer = {name: values[layer["layer"]] for name, values in masses.items()}
                    layer["masses"] = {name: values.tolist() for name, values in of_layer.items()}
            self.record.add(what, kept)
        read = watched(kept["layers"], "taking projections away", self.progress)
        layers = [self._ablated(LayerReading(**layer)) for layer in read]
        return Reading(layers, kept["viewed"], kept["columns"], kept["rows"])

    def _ablated(self, layer: LayerReading) -> LayerReading:
        """With the perplexities of the test text without the layer's projection."""
        perplexities = {}
        for name, visitor in ablations(self.subject.model, layer.layer).items():
            what = {"ablation": name, "layer": layer.layer}
            kept = self.record.get(what)
            if kept is None:
                nats, tokens = self._scored(visitor)
                kept = asdict(Measured(0.0, nats, tokens))
                self.record.add(what, kept)
            perplexities[name] = Measured(**kept).perplexity
        return replace(
            layer, zero_perplexity=perplexities["zero"], identity_perplexity=perplexities.get("identity")
        )


def agreements(ranked: Scores, share: float) -> list[Agreement]:
    """Of all pairs of scores.

    Args:
        ranked: by name, per layer (h,), low = does nothing.
        share: of heads that are the lowest ones.
    """
    heads = sum(len(layer) for layer in next(iter(ranked.values()), []))
    lowest = max(1, round(share * heads))
    found = []
    for one, other in combinations(ranked, 2):
        rank = spearman(ranked[one], ranked[other])
        shared = overlap_of_lowest(ranked[one], ranked[other], lowest)
        found.append(Agreement(one, other, rank, lowest, *shared))
    return found
