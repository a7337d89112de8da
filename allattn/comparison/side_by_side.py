"""Finished runs side by side: variants as they stand, methods at equal size, families at equal parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allattn.comparison.compared_run import ComparedRun, DenseRun, FinishedRun, LeftOut
from allattn.comparison.curves import At
from allattn.comparison.equal_size import EqualRow, equal_rows
from allattn.comparison.families import FamilyRow, family_rows
from allattn.comparison.placed import PlacedRun, place
from allattn.comparison.rows import Row, dense_rows, variant_rows
from allattn.comparison.task_results import run_otherwise
from allattn.comparison.variants import mislabelled, reference_settings, unexpected_differences
from allattn.errors import InputError


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what there is to say about it."""

    placed: list[PlacedRun]  # by model, variant, then seed
    rows: list[Row]  # dense models first
    at: At
    equal: list[EqualRow]
    families: list[FamilyRow]  # empty where there is one model alone
    reference: dict[str, Any] | None  # the full method's settings; None where no run is of it
    left_out: list[LeftOut]
    warnings: list[str]

    @property
    def runs(self) -> list[ComparedRun]:
        """The pruning runs, in the table's order."""
        return [each.run for each in self.placed]

    def labels(self) -> list[str]:
        """The variants in the table's order."""
        return list(dict.fromkeys(each.label for each in self.placed))

    def tasks(self) -> list[str]:
        """Names of the numbers that lm-evaluation-harness found of any model."""
        models = [model for row in self.rows for model in row.models]
        return sorted({name for model in models for name in model.tasks.values})

    def of(self, label: str) -> list[ComparedRun]:
        """The runs of a variant, by seed."""
        return [each.run for each in self.placed if each.label == label]


def side_by_side(
    runs: Sequence[FinishedRun],
    left_out: Sequence[LeftOut],
    vary: Sequence[str] = (),
    at: At = At.heads,
    at_sparsity: float | None = None,
) -> Comparison:
    """All tables of a comparison.

    Args:
        runs: finished runs, at least one of them a pruning run. Pretraining runs on the same text take part
            as dense models; those on another are named among the ones left out.
        left_out: what to name beside them.
        vary: settings other than the gates' whose values make variants.
        at: which size is to be equal where methods are compared.
        at_sparsity: that size as share of heads that are gone; None = the mean of the full method's runs.

    Raises:
        InputError: pruning runs differ in text, vocabulary or number of scored tokens, or two are of one
            variant and seed.
    """
    runs = sorted(runs, key=lambda run: (run.name, run.where))  # the same wherever they were read
    pruning = [run for run in runs if isinstance(run, ComparedRun)]
    _refuse_mixed_texts(pruning)
    text = pruning[0].text
    pretraining = [run for run in runs if isinstance(run, DenseRun)]
    of_text = [run for run in pretraining if run.text == text]
    foreign = [
        LeftOut(run.where, "a dense model of another text or vocabulary, or with other tokens scored")
        for run in pretraining
        if run.text != text
    ]
    placed, dense, twice = place(pruning, of_text, vary)
    _refuse_duplicates(placed)
    rows = [*dense_rows(dense), *variant_rows(placed)]
    comparison = Comparison(
        placed,
        rows,
        at,
        equal_rows(placed, at, at_sparsity),
        family_rows(placed, dense, rows),
        reference_settings(pruning, vary),
        [*left_out, *foreign, *twice],
        [],
    )
    comparison.warnings.extend(_warnings(comparison, of_text, vary))
    return comparison


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


def _refuse_duplicates(placed: Sequence[PlacedRun]) -> None:
    seen: dict[tuple[str, int], ComparedRun] = {}
    for each in placed:
        run, variant = each.run, each.label
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


def _warnings(comparison: Comparison, dense: Sequence[DenseRun], vary: Sequence[str]) -> list[str]:
    lines = unexpected_differences(comparison.runs, vary)
    lines += _scored_otherwise(comparison.runs[0], dense)
    lines += run_otherwise([model.tasks for row in comparison.rows for model in row.models])
    if comparison.reference is None:
        lines.append("no run is of the full method, so there are no differences from it")
    lines += [
        f"{each.run.name} is labelled ablation={each.run.settings['ablation']}, but by its settings it is "
        f"{each.variant}"
        for each in comparison.placed
        if mislabelled(each.run)
    ]
    every = {run.seed for run in comparison.runs}
    for label in comparison.labels():
        lacking = sorted(every - {run.seed for run in comparison.of(label)})
        if lacking:
            lines.append(f"{label} lacks seed {', '.join(map(str, lacking))} that other variants have")
    for model in dict.fromkeys(each.model for each in comparison.placed):
        for seed in sorted(every):
            own = [each.run for each in comparison.placed if (each.model, each.run.seed) == (model, seed)]
            unlike = [run.name for run in own if not run.dense.is_same(own[0].dense)]
            if unlike:
                lines.append(
                    f"seed {seed}: {', '.join(unlike)} started from another dense model than {own[0].name}"
                )
    return lines


def _scored_otherwise(run: ComparedRun, dense: Sequence[DenseRun]) -> list[str]:
    """A line per dense run that was evaluated by other settings than the pruning runs."""

    def how(run: FinishedRun) -> dict[str, Any]:
        settings = {name: value for name, value in run.settings.items() if name.startswith("eval.")}
        return {name: value for name, value in settings.items() if name != "eval.interval"}

    return [
        f"{each.name}, a dense run, was evaluated by other settings"
        for each in dense
        if how(each) != how(run)
    ]
