"""A finished run as a comparison needs it, built from its records wherever they were kept."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allattn.comparison.task_results import TaskResults, task_results
from allattn.record.articles import articles_from_record
from allattn.record.score_lines import how_line
from allattn.training.flat_names import flat
from allattn.training.tally import ByArticle

FAMILY = "All-attention"  # of results that do not name it: there was no other when they were written
_NUMBERS = (  # settings that must be numbers, where they are there
    "seed",
    "gates.freeze_step",
    "gates.initial_pi",
    "gates.lambda_warmup_steps",
    "schedule.batch_size",
    "schedule.segment_length",
)
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

    family: str
    perplexity: float
    sparsity: float  # share of heads that are gone
    heads_kept: list[list[int]]  # original indices per layer
    heads_total: int  # of the dense model, over all layers
    layer_parameters: int  # without the embedding side
    embedding_parameters: int  # embedding, softmax and position table
    layer_microseconds: float | None  # time of the layers per token; None where it was not measured
    checkpoint_hash: str | None  # None in results that do not hold it
    articles: ByArticle | None = field(default=None, compare=False)  # nats of the test text, where kept
    tasks: TaskResults = field(default_factory=TaskResults, compare=False)  # of lm-evaluation-harness

    @property
    def parameters(self) -> int:
        """All parameters, embedding side included."""
        return self.layer_parameters + self.embedding_parameters

    @property
    def heads(self) -> int:
        """Heads kept over all layers."""
        return sum(map(len, self.heads_kept))

    def is_same(self, other: "ModelFacts") -> bool:
        """By the checkpoint's hash; where a result lacks it, by the score but for its last digits."""
        if self.checkpoint_hash is not None and other.checkpoint_hash is not None:
            return self.checkpoint_hash == other.checkpoint_hash
        return math.isclose(self.perplexity, other.perplexity, rel_tol=1e-4)


@dataclass(frozen=True)
class Validation:
    """A perplexity of the validation split, and the optimizer step it was measured at."""

    perplexity: float
    step: int


@dataclass(frozen=True)
class FinishedRun:
    """One finished run, of either stage."""

    name: str
    where: str  # its folder, or ENTITY/PROJECT/ID in W&B
    settings: dict[str, Any]  # by dotted name, `environment.` included
    seed: int
    text: tuple[str, str, int]  # vocabulary hash, data fingerprint, test tokens scored
    updates: int | None  # optimizer steps; None in results that do not hold them
    dense: ModelFacts  # the trained model; of a pruning run, the one it began with
    scored: str | None  # how, in words; None in results of versions that did not record it
    unseen_words: float | None  # share of the test text's words that the vocabulary lacks; None: likewise


@dataclass(frozen=True)
class DenseRun(FinishedRun):
    """One finished pretraining run."""


@dataclass(frozen=True)
class ComparedRun(FinishedRun):
    """One finished pruning run."""

    pruned: ModelFacts
    updates_after_cut: int | None  # of `updates`, those since the last removal; None: likewise
    history: list[dict[str, float]]  # one row per step, in order, with `step`; what was measured there

    @property
    def freeze_step(self) -> int:
        """Step after which the model has the heads it keeps; 0 where they are chosen before the training."""
        if self.updates is not None and self.updates_after_cut is not None:
            return self.updates - self.updates_after_cut
        learned = self.settings["gates.selection"] == "l0"
        return int(self.settings["gates.freeze_step"]) if learned else 0

    @property
    def tokens_after_cut(self) -> int | None:
        """Tokens that the model was trained on with the heads it keeps; None where updates are not known."""
        streams, length = (self.settings.get(f"schedule.{name}") for name in ("batch_size", "segment_length"))
        if self.updates is None or streams is None or length is None:
            return None
        return (self.updates - self.freeze_step) * int(streams) * int(length)

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


def is_pretraining_run(config: Any) -> bool:
    """Whether a configuration is that of a pretraining run."""
    return isinstance(config, Mapping) and "gates" not in config and isinstance(config.get("model"), Mapping)


def finished_run(
    name: str,
    where: str,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
    articles: Mapping[str, Any] | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> ComparedRun | DenseRun:
    """A run from its records.

    Args:
        name: the run's name.
        where: how to find it again.
        config: its settings, nested; they say of which stage it is.
        result: its result, nested or joined by slashes.
        history: rows of metrics with `step`; cells that are no numbers are passed over. Of a pretraining run
            nothing is read.
        articles: nats by article of each model, as kept beside the result; None where they were not.
        tasks: what `allattn lm-eval` kept of the run's last checkpoint; likewise.

    Raises:
        Damaged: something that the comparison needs is missing or is not what it must be.
    """
    pruning = is_pruning_run(config)
    settings = dict(flat(config, "."))
    record = dict(flat(result, "/"))
    environment = _below(record, "environment/")
    settings |= {f"environment.{name}": value for name, value in environment.items() if value is not None}
    for needed in ("seed", "gates.selection", "gates.freeze_step") if pruning else ("seed",):
        if needed not in settings:
            raise Damaged(f"its settings lack {needed}")
    for used in _NUMBERS:
        number = _number(settings.get(used, 0))
        if number is None or not math.isfinite(number):
            raise Damaged(f"its settings hold {str(settings[used])[:40]!r} for {used}")
    rows = merged_by_step(history) if pruning else []
    if pruning and not rows:
        raise Damaged("no metrics")
    model = "pruned" if pruning else "dense"
    how = _below(record, f"{model}/evaluation/")
    unseen = record.get("corpus/unseen_words/test/share")
    own = TaskResults() if tasks is None else _task_results(tasks)
    try:
        shared: dict[str, Any] = {
            "name": name,
            "where": where,
            "settings": settings,
            "seed": int(settings["seed"]),
            "text": (
                str(record["corpus/vocabulary_hash"]),
                str(record["corpus/data_fingerprint"]),
                int(record[f"{model}/test/tokens_scored"]),
            ),
            "updates": None if record.get("steps") is None else int(record["steps"]),
            "dense": _model_facts(record, "dense", articles, TaskResults() if pruning else own),
            "scored": how_line(how) if how else None,
            "unseen_words": None if unseen is None else float(unseen),
        }
        if not pruning:
            return DenseRun(**shared)
        after_cut = record.get("updates_after_cut")
        return ComparedRun(
            **shared,
            pruned=_model_facts(record, "pruned", articles, own),
            updates_after_cut=None if after_cut is None else int(after_cut),
            history=rows,
        )
    except KeyError as error:
        raise Damaged(f"its result lacks {error.args[0]}") from None
    except (TypeError, ValueError, OverflowError) as error:
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
    except (TypeError, ValueError, OverflowError):
        return None


def _below(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix).replace("/", "."): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def _model_facts(
    record: Mapping[str, Any], model: str, articles: Mapping[str, Any] | None, tasks: TaskResults
) -> ModelFacts:
    perplexity = float(record[f"{model}/test/perplexity"])
    if not (math.isfinite(perplexity) and perplexity > 0):
        raise Damaged(f"{model} test perplexity is {perplexity}")
    checkpoint_hash = record.get("dense_hash") if model == "dense" else None
    microseconds = record.get(f"{model}/layer_microseconds_per_token")
    return ModelFacts(
        str(record.get(f"{model}/family", FAMILY)),
        perplexity,
        float(record[f"{model}/sparsity"]),
        [[int(head) for head in layer] for layer in record[f"{model}/heads_kept"]],
        int(record[f"{model}/heads_total"]),
        int(record[f"{model}/parameters/layers"]),
        int(record[f"{model}/parameters/embedding_side"]),
        None if microseconds is None else float(microseconds),
        None if checkpoint_hash is None else str(checkpoint_hash),
        _test_articles(articles or {}, model),
        tasks,
    )


def _task_results(record: Mapping[str, Any]) -> TaskResults:
    try:
        return task_results(record)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise Damaged("its lm_eval.json cannot be read") from None


def _test_articles(articles: Mapping[str, Any], model: str) -> ByArticle | None:
    if model not in articles:
        return None
    try:
        return articles_from_record(articles[model])["test"]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise Damaged("its articles.json cannot be read") from None
