"""The comparison's arithmetic against independent work, and what may stand in one table."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.made_up import DENSE_LAYERS, EMBEDDING, OFF, PER_HEAD, config, history, result
from support.study_fixtures import PERPLEXITIES

from allattn.comparison.compared_run import ComparedRun, finished_run
from allattn.comparison.published import PAPER_DIFFERENCES
from allattn.comparison.rows import DENSE, Row
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import RUN_COLUMNS, run_cells
from allattn.errors import InputError

NAMES = {
    "full": "full method",
    "warm-up": "without lambda warm-up",
    "init": "without positive initialization",
    "scaling": "without output scaling",
    "three": "without all three",
}


def made_up(
    perplexity: float, name: str = "run", seed: int = 1, kept: int = 12, text: Any = None, **changes: Any
) -> ComparedRun:
    record = result(perplexity, kept, **(text or {}))
    return finished_run(name, f"runs/{name}-{seed}", config(name, seed, **changes), record, history())


def rows_of(comparison: Comparison) -> dict[str, Row]:
    return {row.label: row for row in comparison.rows}


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    runs, left_out = read_local_runs([study])
    return side_by_side(runs, left_out)


@pytest.mark.parametrize("variant", OFF)
def test_means_and_intervals_of_the_study(variant: str, comparison: Comparison) -> None:
    row = rows_of(comparison)[NAMES[variant]]
    values = list(PERPLEXITIES[variant].values())
    assert row.seeds == [1, 2, 3]
    assert row.test.mean == pytest.approx(statistics.mean(values))
    assert row.test.deviation == pytest.approx(statistics.stdev(values))
    assert (row.sparsity, row.heads, row.heads_total) == (0.25, 12, 16)
    assert (row.updates, row.tokens_after_cut) == (400, 200 * 16 * 64)


def test_dense_row_is_the_one_model_all_started_from(comparison: Comparison) -> None:
    row = comparison.rows[0]
    assert row.label == DENSE
    assert (row.sparsity, row.heads, row.layer_parameters) == (0, 16, DENSE_LAYERS)
    assert row.test.mean == 100
    assert math.isnan(row.test.deviation)


def test_order_is_the_papers(comparison: Comparison) -> None:
    assert [row.label for row in comparison.rows] == [DENSE, *NAMES.values()]
    assert set(PAPER_DIFFERENCES) == {*NAMES.values()} - {NAMES["full"]}
    assert comparison.warnings == []


def test_best_is_found_after_the_freeze_and_last_is_the_end(comparison: Comparison) -> None:
    """Step 100 scores 1.0, with all heads still there: it is not the pruned model's."""
    run = comparison.of("full method")[0]
    assert min(row.get("valid_perplexity", math.inf) for row in run.history) == 1.0
    best, last = run.best_validation(), run.last_validation()
    assert best is not None
    assert last is not None
    assert (best.perplexity, best.step) == (pytest.approx(119.85), 300)
    assert (last.perplexity, last.step) == (pytest.approx(122.85), 400)
    row = rows_of(comparison)["full method"]
    assert row.best is not None
    assert row.best.steps == [300, 300, 300]
    assert row.best.perplexity.mean == pytest.approx(statistics.mean(PERPLEXITIES["full"].values()) - 5)


def test_compression_has_units_and_bases() -> None:
    """12 of 16 heads: each removed head is 2,304 parameters of the layers; the embedding side stays."""
    comparison = side_by_side([made_up(120, kept=12)], [])
    cells = dict(zip(RUN_COLUMNS, run_cells(comparison)[0], strict=True))
    layers = DENSE_LAYERS - 4 * PER_HEAD
    assert DENSE_LAYERS - layers == 9_216
    assert cells["heads kept"] == "12/16"
    assert cells["parameters, layers (without embedding side)"] == f"{layers:,}"
    assert cells["parameters, embedding side"] == f"{EMBEDDING:,}"
    assert cells["parameters, all (with embedding side)"] == f"{layers + EMBEDDING:,}"


def test_every_setting_of_the_gates_makes_a_variant() -> None:
    runs = [
        made_up(120, "a", 1),
        made_up(121, "b", 2),
        made_up(119, "c", 1, **{"gates.lambda_max": 0.01}),
        made_up(118, "d", 1, **{"gates.lambda_max": 0.01, "gates.output_scaling": False}),
        made_up(117, "e", 1, **{"gates.target_sparsity": 0.438}),
        made_up(116, "f", 1, **{"gates.initial_pi": 1.0}),
        made_up(115, "g", 1, **{"gates.selection": "magnitude", "gates.target_sparsity": 0.438}),
        made_up(114, "h", 1, **{"gates.selection": "random", "gates.target_sparsity": 0.5}),
    ]
    found = side_by_side(runs, [])
    assert {each.run.name: each.variant for each in found.placed} == {
        "a": "full method",
        "b": "full method",
        "c": "lambda 0.01",
        "d": "without output scaling, lambda 0.01",
        "e": "target 0.438",
        "f": "initial pi 1",
        "g": "magnitude selection, target 0.438",
        "h": "random selection, target 0.5",
    }


def test_a_selection_without_gates_has_no_lambda() -> None:
    """Settings that only learned gates read do not split the variant of a run without them."""
    chosen = {"gates.selection": "random", "gates.target_sparsity": 0.5}
    runs = [made_up(120, "a", 1, **chosen), made_up(121, "b", 2, **chosen, **{"gates.lambda_max": 0.5})]
    assert len(side_by_side(runs, []).labels()) == 1


def test_settings_of_selections_and_teacher_make_variants_where_they_act() -> None:
    """The step of the freeze does not act without gates, nor the temperature without a teacher."""
    chosen = {"gates.selection": "iterative", "gates.target_sparsity": 0.5, "gates.selection_steps": None}
    several = chosen | {"gates.iterations": 4, "distill.weight": 0.0, "distill.temperature": 1.0}
    taught = several | {"distill.weight": 0.5, "distill.gates": True}
    runs = [
        made_up(120, "a", 1, **several),
        made_up(121, "a", 2, **several | {"gates.freeze_step": 7, "distill.temperature": 3.0}),
        made_up(122, "b", 1, **several | {"gates.iterations": 2}),
        made_up(123, "c", 1, **taught),
        made_up(124, "c", 2, **taught | {"distill.gates": False}),
        made_up(125, "d", 1, **several | {"gates.selection": "gradient"}),
        made_up(126, "d", 2, **several | {"gates.selection": "gradient", "gates.iterations": 2}),
    ]
    comparison = side_by_side(runs, [])
    assert sorted(row.seeds for row in comparison.rows if row.pruned) == [[1], [1, 2], [1, 2], [1, 2]]
    assert sum("distillation 0.5" in label for label in comparison.labels()) == 1
    assert not any("differs" in line for line in comparison.warnings)


def test_scores_before_the_last_removal_are_those_of_a_larger_model() -> None:
    record = result(120) | {"updates_after_cut": 100, "tokens_after_cut": 100 * 16 * 64}
    chosen = {"gates.selection": "iterative", "gates.target_sparsity": 0.5}
    run = finished_run("a", "runs/a", config("a", 1, **chosen), record, history())
    assert isinstance(run, ComparedRun)
    assert run.tokens_after_cut == record["tokens_after_cut"]
    assert [score.step for score in run.validations()] == [300, 400]


def test_the_variant_comes_from_the_settings_not_from_the_label() -> None:
    comparison = side_by_side([made_up(120, ablation="no_output_scaling")], [])
    assert comparison.labels() == ["full method"]
    assert any("labelled ablation=no_output_scaling" in line for line in comparison.warnings)


def test_full_method_of_a_sweep_is_the_one_with_most_runs_then_the_papers() -> None:
    sweep = [
        made_up(120 + i, f"s{i}", 1, **{"gates.lambda_max": x}) for i, x in enumerate((0.01, 0.02, 0.03))
    ]
    found = side_by_side(sweep, []).reference
    assert found is not None
    assert found["gates.lambda_max"] == 0.02
    more = [*sweep, made_up(119, "more", 2, **{"gates.lambda_max": 0.03})]
    found = side_by_side(more, []).reference
    assert found is not None
    assert found["gates.lambda_max"] == 0.03


def test_without_the_full_method_there_are_no_differences() -> None:
    comparison = side_by_side([made_up(120, "a", **OFF["scaling"]), made_up(121, "b", **OFF["init"])], [])
    assert all(row.difference is None and row.asked is None for row in comparison.equal)
    assert any("full method" in line for line in comparison.warnings)


def test_seeds_that_only_one_variant_has_are_not_paired() -> None:
    runs = [made_up(120, "a", 1), made_up(121, "a", 2)]
    runs += [made_up(125, "b", 2, **OFF["init"]), made_up(900, "b", 3, **OFF["init"])]
    comparison = side_by_side(runs, [])
    difference = comparison.equal[1].difference
    assert difference is not None
    assert (difference.mean, difference.pairs) == (pytest.approx(4), 1)
    assert "full method lacks seed 3 that other variants have" in comparison.warnings


def test_other_differences_are_named_by_run_and_setting() -> None:
    runs = [
        made_up(120, "a", 1),
        made_up(121, "b", 2),
        made_up(122, "odd", 1, **OFF["init"], **{"optimizer.learning_rate": 0.5, "runs_folder": "elsewhere"}),
    ]
    (warning,) = [line for line in side_by_side(runs, []).warnings if "differs" in line]
    assert warning == "optimizer.learning_rate differs: 0.5 in odd; 0.001 in the others"


def test_a_dense_model_is_known_by_its_hash() -> None:
    """Evaluated in two ways one model has two perplexities; two models may have one."""

    def warned(*dense: tuple[str | None, float]) -> list[str]:
        runs = []
        for number, (dense_hash, perplexity) in enumerate(dense):
            record = result(120, dense=perplexity) | {"dense_hash": dense_hash}
            changes: dict[str, Any] = {"gates.lambda_max": 0.01 * (number + 2)}
            runs.append(finished_run(f"r{number}", f"r{number}", config(**changes), record, history()))
        return [line for line in side_by_side(runs, []).warnings if "another dense model" in line]

    assert warned(("a", 100.0), ("a", 110.0)) == []
    assert warned(("a", 100.0), ("b", 100.0)) == ["seed 1: r1 started from another dense model than r0"]
    assert warned((None, 100.0), ("b", 100.001)) == [], "a result without the hash: by the score"
    assert warned((None, 100.0), ("b", 101.0)) != []


def test_a_checkpoint_per_seed_is_expected_but_not_one_per_variant() -> None:
    def pair(first: str, second: str) -> list[str]:
        runs = [made_up(120, "a", 1, checkpoint="one"), made_up(121, "b", 2, checkpoint="two")]
        runs += [made_up(122, "c", 1, checkpoint=first, **OFF["init"])]
        runs += [made_up(123, "d", 2, checkpoint=second, **OFF["init"])]
        return [line for line in side_by_side(runs, []).warnings if line.startswith("checkpoint")]

    assert pair("one", "two") == []
    assert pair("one", "one") != []


def test_what_varies_beside_the_gates_can_be_named() -> None:
    runs = [made_up(120, "a"), made_up(121, "b", **{"optimizer.learning_rate": 0.5})]
    with pytest.raises(
        InputError, match=r"runs/a-1 and runs/b-1 are both full method .* optimizer.learning_rate"
    ):
        side_by_side(runs, [])
    comparison = side_by_side(runs, [], ["optimizer.learning_rate"])
    assert sorted(comparison.labels()) == ["full method", "learning rate 0.5"]
    assert comparison.warnings == []


@pytest.mark.parametrize(
    "text", [{"vocabulary_hash": "w" * 64}, {"data_fingerprint": "g" * 64}, {"tokens_scored": 998}]
)
def test_runs_on_different_texts_are_not_ranked(text: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"runs/a-1 .*; runs/b-1 .* choose those of one text by"):
        side_by_side([made_up(120, "a"), made_up(121, "b", text=text, **OFF["init"])], [])


def test_an_iterative_run_goes_by_its_last_removal() -> None:
    """Scores between its removals are of larger models; runs of other iterations are other variants."""
    rows = [
        {"step": step, "loss": 5.0, "valid_perplexity": value, "valid_loss": math.log(value)}
        for step, value in ((100, 90.0), (300, 120.0), (400, 110.0))
    ]
    runs = []
    for iterations, after in ((4, 100), (2, 200)):
        settings = config(
            f"run-{iterations}",
            **{
                "gates.selection": "iterative",
                "gates.target_sparsity": 0.25,
                "gates.iterations": iterations,
            },
        )
        record = result(112.0) | {"steps": 400, "updates_after_cut": after}
        runs.append(finished_run(settings["name"], settings["name"], settings, record, rows))
    first = runs[0]
    assert isinstance(first, ComparedRun)
    assert (first.freeze_step, first.tokens_after_cut) == (300, 100 * 16 * 64)
    best = first.best_validation()
    assert best is not None
    assert best.perplexity == 110.0
    pruned = [row for row in side_by_side(runs, []).rows if row.pruned]
    assert len(pruned) == 2
