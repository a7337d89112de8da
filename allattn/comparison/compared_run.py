"""A finished pruning run as a comparison needs it, built from its records wherever they were kept."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from allattn.record.score_lines import how_line
from allattn.training.flat_names import flat

_READ = ("step", "loss", "sparsity", "valid_loss", "valid_perplexity")  # metrics that must be numbers


class Damaged(Exception):
    """A run's records cannot be used; the message says why, in a few words."""


@dataclass(frozen=True)
class LeftOut:
    """A run that takes no part, and why."""

    where: str
    why: str


@dataclass(frozen=True)
class ModelFacts:
    """A model's size and its perplexity on the test split."""

    perplexity: float
    sparsity: float  # share of heads that are gone
    heads_kept: list[list[int]]  # original indices per layer
    heads_total: int  # of the dense model, over all layers
    layer_parameters: int  # without the embedding side
    embedding_parameters: int  # embedding, softmax and position table

    @property
    def parameters(self) -> int:
        """All parameters, embedding side included."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def heads(self) -> int:
        """Heads kept over all layers."""
        return sum(map(len, self.heads_kept))


@dataclass(frozen=True)
class Validation:
    """A perplexity of the validation split, and the optimizer step it was measured at."""

    perplexity: float
    step: int


@dataclass(frozen=True)
class ComparedRun:
    """One finished pruning run."""

    name: str
    where: str  # its folder, or ENTITY/PROJECT/ID in W&B
    settings: dict[str, Any]  # by dotted name, `environment.` included
    seed: int
    text: tuple[str, str, int]  # vocabulary hash, data fingerprint, test tokens scored
    dense: ModelFacts  # before the pruning
    pruned: ModelFacts
    history: list[dict[str, float]]  # one row per step, in order, with `step`; what was measured there
    scored: str | None  # how, in words; None in results of versions that did not record it
    unseen_words: float | None  # share of the test text's words that the vocabulary lacks; None: likewise

    @property
    def freeze_step(self) -> int:
        """Step at which the heads are decided; 0 where they are chosen before the training."""
        learned = self.settings["gates.selection"] == "l0"
        return int(self.settings["gates.freeze_step"]) if learned else 0

    def validations(self) -> list[Validation]:
        """Validation scores of the model with the heads it keeps: from the freeze on.

        A score before the freeze is that of a larger model. Where all were measured before, all are given.
        """
        scores = [
            Validation(row["valid_perplexity"], int(row["step"]))
            for row in self.history
            if math.isfinite(row.get("valid_perplexity", math.nan))
        ]
        return [score for score in scores if score.step >= self.freeze_step] or scores

    def best_validation(self) -> Validation | None:
        """The lowest of `validations`; the first one of equals."""
        return min(self.validations(), key=lambda score: score.perplexity, default=None)

    def last_validation(self) -> Validation | None:
        """The latest of `validations`."""
        return self.validations()[-1] if self.validations() else None


def is_pruning_run(config: Any) -> bool:
    """Whether a configuration is that of a pruning run."""
    return isinstance(config, Mapping) and isinstance(config.get("gates"), Mapping)


def compared_run(
    name: str,
    where: str,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
) -> ComparedRun:
    """A run from its records.

    Args:
        name: the run's name.
        where: how to find it again.
        config: its settings, nested.
        result: its result, nested or joined by slashes.
        history: rows of metrics with `step`; cells that are no numbers are passed over.

    Raises:
        Damaged: something that the comparison needs is missing or is not what it must be.
    """
    settings = dict(flat(config, "."))
    record = dict(flat(result, "/"))
    settings |= {f"environment.{name}": value for name, value in _below(record, "environment/").items()}
    for name_needed in ("seed", "gates.selection", "gates.freeze_step"):
        if name_needed not in settings:
            raise Damaged(f"its settings lack {name_needed}")
    rows = merged_by_step(history)
    if not rows:
        raise Damaged("no metrics")
    try:
        return ComparedRun(
            name,
            where,
            settings,
            int(settings["seed"]),
            (
                str(record["corpus/vocabulary_hash"]),
                str(record["corpus/data_fingerprint"]),
                int(record["pruned/test/tokens_scored"]),
            ),
            _model_facts(record, "dense"),
            _model_facts(record, "pruned"),
            rows,
            how_line(how) if (how := _below(record, "pruned/evaluation/")) else None,
            None if (unseen := record.get("corpus/unseen_words/test/share")) is None else float(unseen),
        )
    except KeyError as error:
        raise Damaged(f"its result lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise Damaged(f"its result cannot be read ({error})") from None


def merged_by_step(history: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """One row per step, in order; of values logged twice (a resumed run) the later counts.

    Raises:
        Damaged: a metric that the comparison reads is no number.
    """
    rows: dict[int, dict[str, float]] = {}
    for entry in history:
        for name in _READ:
            if entry.get(name) is not None and _number(entry[name]) is None:
                raise Damaged(f"its metrics hold {str(entry[name])[:40]!r} for {name}")
        numbers = {name: number for name, value in entry.items() if (number := _number(value)) is not None}
        if "step" in numbers and math.isfinite(numbers["step"]):
            rows.setdefault(int(numbers["step"]), {}).update(numbers)
    return [rows[step] for step in sorted(rows)]


def _number(value: Any) -> float | None:
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _below(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix).replace("/", "."): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def _model_facts(record: Mapping[str, Any], model: str) -> ModelFacts:
    perplexity = float(record[f"{model}/test/perplexity"])
    if not (math.isfinite(perplexity) and perplexity > 0):
        raise Damaged(f"{model} test perplexity is {perplexity}")
    return ModelFacts(
        perplexity,
        float(record[f"{model}/sparsity"]),
        [[int(head) for head in layer] for layer in record[f"{model}/heads_kept"]],
        int(record[f"{model}/heads_total"]),
        int(record[f"{model}/parameters/layers"]),
        int(record[f"{model}/parameters/embedding_side"]),
    )
