"""Pruning runs with what they are one of, and the dense models beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allattn.comparison.compared_run import ComparedRun, DenseRun, LeftOut, ModelFacts
from allattn.comparison.variants import method_names, model_names, variant_names, variant_order


@dataclass(frozen=True)
class PlacedRun:
    """A pruning run and what it is one of."""

    run: ComparedRun
    model: str  # what was pruned: its family, and its size where there are several
    variant: str
    method: str
    prefix: str  # that model's name, where the pruning runs are of several

    @property
    def label(self) -> str:
        """The variant, with the model where there are several."""
        return self.prefix + self.variant

    @property
    def method_label(self) -> str:
        """The method, with the model where there are several."""
        return self.prefix + self.method


@dataclass(frozen=True)
class DenseModels:
    """Dense models of one family and size."""

    name: str
    by_seed: dict[int, ModelFacts]  # one model may stand for several seeds
    updates: dict[int, int | None]  # of the seeds whose own run is here

    def distinct(self) -> list[ModelFacts]:
        """Each model once."""
        found: list[ModelFacts] = []
        for model in self.by_seed.values():
            if not any(model.is_same(other) for other in found):
                found.append(model)
        return found


def place(
    runs: Sequence[ComparedRun], pretraining: Sequence[DenseRun], vary: Sequence[str]
) -> tuple[list[PlacedRun], list[DenseModels], list[LeftOut]]:
    """Pruning runs by model, variant and seed; the dense models; dense runs of a place that is taken.

    A dense model that pruning runs started from stands for their seeds; one that has only its own run, for
    its own seed.

    Args:
        runs: pruning runs.
        pretraining: pretraining runs on the same text.
        vary: settings other than the gates' whose values make variants.
    """
    everyone = sorted([*runs, *pretraining], key=lambda run: (run.dense.family, -run.dense.layer_parameters))
    names = dict(
        zip((run.where for run in everyone), model_names([run.dense for run in everyone]), strict=True)
    )
    several = len({names[run.where] for run in runs}) > 1
    placed = [
        PlacedRun(run, names[run.where], variant, method, f"{names[run.where]}, " if several else "")
        for run, variant, method in zip(
            runs, variant_names(runs, vary), method_names(runs, vary), strict=True
        )
    ]
    order = list(dict.fromkeys(names.values()))  # large models first
    placed.sort(key=lambda each: (order.index(each.model), variant_order(each.variant), each.run.seed))
    return placed, *_dense_models(placed, pretraining, names)


def _dense_models(
    placed: Sequence[PlacedRun], pretraining: Sequence[DenseRun], names: Mapping[str, str]
) -> tuple[list[DenseModels], list[LeftOut]]:
    dense = {name: DenseModels(name, {}, {}) for name in dict.fromkeys(names.values())}
    for each in placed:
        dense[each.model].by_seed.setdefault(each.run.seed, each.run.dense)
    twice = []
    for run in pretraining:
        models = dense[names[run.where]]
        for seed, model in models.by_seed.items():  # from pruning runs: they lack its results on tasks
            if run.dense.tasks.values and model.is_same(run.dense):
                models.by_seed[seed] = replace(model, tasks=run.dense.tasks)
        if models.by_seed.setdefault(run.seed, run.dense).is_same(run.dense):
            models.updates.setdefault(run.seed, run.updates)
        elif not any(run.dense.is_same(other) for other in models.by_seed.values()):
            why = f"another dense model of its family and size takes part with seed {run.seed}"
            twice.append(LeftOut(run.where, why))
    return list(dense.values()), twice
