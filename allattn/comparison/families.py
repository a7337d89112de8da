"""Models of several families and sizes against one of them, at equal parameters of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from allattn.comparison.compared_run import FAMILY, ModelFacts
from allattn.comparison.curves import At, Curve, curve
from allattn.comparison.doubt import Difference, paired_difference
from allattn.comparison.placed import DenseModels, PlacedRun
from allattn.comparison.rows import Row
from allattn.comparison.variants import FULL


@dataclass(frozen=True)
class FamilyRow:
    """A row of the table against the reference model's runs at the row's own parameters, seed by seed."""

    row: Row
    reference: str  # that model
    curves: dict[int, Curve]  # of its dense model and its full method, by seed
    difference: Difference | None  # None where no seed's curve reaches the row's parameters


def family_rows(
    placed: Sequence[PlacedRun], dense: Sequence[DenseModels], rows: Sequence[Row]
) -> list[FamilyRow]:
    """The rows of every model but the reference; none where there is one model alone.

    The reference is the All-attention model that most pruning runs began with; without one, any family's.
    """
    if len(dense) == 1:
        return []
    begun = [each.model for each in placed]
    reference = max(
        (each for each in dense if each.name in begun),
        key=lambda each: (_family(each) == FAMILY, begun.count(each.name)),
    )
    models: dict[int, list[ModelFacts]] = {seed: [model] for seed, model in reference.by_seed.items()}
    for each in placed:
        if (each.model, each.method) == (reference.name, FULL):
            models[each.run.seed].append(each.run.pruned)
    drawn = {seed: curve(found, At.parameters) for seed, found in models.items()}
    curves = {seed: found for seed, found in drawn.items() if found is not None}
    return [
        FamilyRow(row, reference.name, curves, _difference(row, curves))
        for row in rows
        if row.model != reference.name
    ]


def _difference(row: Row, curves: dict[int, Curve]) -> Difference | None:
    here = {seed: model.perplexity for seed, model in row.by_seed.items()}
    read = {
        seed: curves[seed].perplexity(model.layer_parameters)
        for seed, model in row.by_seed.items()
        if seed in curves
    }
    return paired_difference(here, {seed: value for seed, value in read.items() if value is not None})


def _family(models: DenseModels) -> str:
    return next(iter(models.by_seed.values())).family
