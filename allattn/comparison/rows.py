"""The table's rows: one variant over its seeds, or the dense models of one family and size."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from allattn.comparison.compared_run import ModelFacts, Validation
from allattn.comparison.doubt import Mean, mean
from allattn.comparison.placed import DenseModels, PlacedRun

DENSE = "dense, before pruning"


@dataclass(frozen=True)
class MeanValidation:
    """Validation perplexity over seeds and the step of each."""

    perplexity: Mean
    steps: list[int]


@dataclass(frozen=True)
class Row:
    """Models as they stand, whatever their sizes."""

    label: str
    model: str  # what was pruned: family, and size where there are several
    pruned: bool
    seeds: list[int]  # empty where one dense model stands for all
    models: list[ModelFacts]  # each once
    by_seed: dict[int, ModelFacts]
    best: MeanValidation | None  # None for dense models and where nothing was measured
    last: MeanValidation | None
    updates: float | None  # mean; None where not known of all
    tokens_after_cut: float | None  # None for dense models, and likewise

    @property
    def sparsity(self) -> float:
        """Mean share of heads that are gone."""
        return statistics.fmean(model.sparsity for model in self.models)

    @property
    def heads(self) -> float:
        """Mean of heads kept, over all layers."""
        return statistics.fmean(model.heads for model in self.models)

    @property
    def heads_total(self) -> int:
        """Heads of the dense model."""
        return self.models[0].heads_total

    @property
    def layer_parameters(self) -> float:
        """Mean, without the embedding side."""
        return statistics.fmean(model.layer_parameters for model in self.models)

    @property
    def parameters(self) -> float:
        """Mean, with the embedding side."""
        return statistics.fmean(model.parameters for model in self.models)

    @property
    def layer_microseconds(self) -> float | None:
        """Mean per token; None where it was not measured of all."""
        return _mean_of_known([model.layer_microseconds for model in self.models])

    @property
    def test(self) -> Mean:
        """Perplexity of the test split."""
        return mean([model.perplexity for model in self.models])

    def task(self, name: str) -> tuple[Mean, int] | None:
        """A number of lm-evaluation-harness over the models that have it, and how many; None of none."""
        known = [model.tasks.values[name] for model in self.models if name in model.tasks.values]
        return (mean(known), len(known)) if known else None


def variant_rows(placed: Sequence[PlacedRun]) -> list[Row]:
    """A row per variant, in the order of the runs."""
    rows = []
    for label in dict.fromkeys(each.label for each in placed):
        group = [each for each in placed if each.label == label]
        runs = [each.run for each in group]
        rows.append(
            Row(
                label,
                group[0].model,
                True,
                [run.seed for run in runs],
                [run.pruned for run in runs],
                {run.seed: run.pruned for run in runs},
                _over_seeds([run.best_validation() for run in runs]),
                _over_seeds([run.last_validation() for run in runs]),
                _mean_of_known([run.updates for run in runs]),
                _mean_of_known([run.tokens_after_cut for run in runs]),
            )
        )
    return rows


def dense_rows(dense: Sequence[DenseModels]) -> list[Row]:
    """A row for the dense models of each family and size: one per seed, or one that stands for all."""
    rows = []
    for each in dense:
        models, seeds = each.distinct(), sorted(each.by_seed)
        own = seeds if len(models) == len(seeds) and (len(seeds) > 1 or each.updates) else []
        rows.append(
            Row(
                DENSE if len(dense) == 1 else f"{each.name}, dense",
                each.name,
                False,
                own,
                models,
                each.by_seed,
                None,
                None,
                _mean_of_known([each.updates.get(seed) for seed in own]),
                None,
            )
        )
    return rows


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None


def _over_seeds(scores: Sequence[Validation | None]) -> MeanValidation | None:
    known = [score for score in scores if score is not None]
    if not known:
        return None
    return MeanValidation(mean([score.perplexity for score in known]), [score.step for score in known])
