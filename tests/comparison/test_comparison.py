"""The comparison's arithmetic against independent work, and what may stand in one table."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from support.study_fixtures import PERPLEXITIES
from support.made_up import DENSE_LAYERS, EMBEDDING, OFF, PER_HEAD, config, history, result

from allattn.errors import InputError
from allattn.comparison.compared_run import ComparedRun, compared_run
from allattn.comparison.comparison import (
    DENSE,
    PAPER_DIFFERENCES,
    Comparison,
    Row,
    compare,
    paired_difference,
    student_t95,
)
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.tables import RUN_COLUMNS, run_cells

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
    return compared_run(name, f"runs/{name}-{seed}", config(name, seed, **changes), record, history())


def rows_of(comparison: Comparison) -> dict[str, Row]:
    return {row.variant: row for row in comparison.rows}


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    runs, left_out = read_local_runs([study])
    return compare(runs, left_out)


def test_student_quantiles_cover_95_percent() -> None:
    """The density of Student's t, integrated numerically up to the quantile."""
    for degrees in [*range(1, 31), 40, 60, 120]:
        quantile = student_t95(degrees)
        x = torch.linspace(0, quantile, 20_001, dtype=torch.float64)
        scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
        density = torch.exp(scale - (degrees + 1) / 2 * torch.log1p(x * x / degrees))
        covered = 2 * torch.trapezoid(density, x).item()
        assert covered == pytest.approx(0.95, abs=2e-4) or (degrees in range(21, 30) and covered > 0.95)


def test_a_quantile_between_two_entries_is_the_wider_one() -> None:
    assert student_t95(27) == student_t95(25) > student_t95(30)
    assert student_t95(10_000) == student_t95(120) > 1.96


def test_paired_difference_worked_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, half width 4.303 / sqrt(3)."""
    found = paired_difference({1: 11.0, 2: 13.0, 3: 33.0, 9: 1.0}, {1: 10.0, 2: 11.0, 3: 30.0, 4: 2.0})
    assert found is not None
    assert found.pairs == 3
    assert found.mean == pytest.approx(2)
    assert found.half_width == pytest.approx(2.48434, abs=1e-5)


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    one = paired_difference({1: 11.0}, {1: 10.0})
    assert one is not None
    assert (one.mean, one.pairs) == (1.0, 1)
    assert math.isnan(one.half_width)
    assert paired_difference({2: 11.0}, {1: 10.0}) is None


@pytest.mark.parametrize("variant", OFF)
def test_means_and_intervals_of_the_study(variant: str, comparison: Comparison) -> None:
    row = rows_of(comparison)[NAMES[variant]]
    values = list(PERPLEXITIES[variant].values())
    assert row.seeds == [1, 2, 3]
    assert row.test.mean == pytest.approx(statistics.mean(values))
    assert row.test.deviation == pytest.approx(statistics.stdev(values))
    assert (row.sparsity, row.heads, row.heads_total) == (0.25, 12, 16)
    if variant == "full":
        assert row.difference is None
        assert row.paper is None
        return
    pairs = [PERPLEXITIES[variant][seed] - PERPLEXITIES["full"][seed] for seed in (1, 2, 3)]
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(statistics.mean(pairs))
    assert row.difference.half_width == pytest.approx(4.303 * statistics.stdev(pairs) / 3**0.5)
    paper = {"warm-up": 0.12, "init": 0.61, "scaling": 1.25, "three": 1.48}
    assert row.paper == paper[variant]


def test_pairing_is_narrower_than_the_spread(comparison: Comparison) -> None:
    """Seeds that are hard for one variant are hard for all: taking pairs removes that."""
    row = rows_of(comparison)[NAMES["warm-up"]]
    assert row.difference is not None
    assert row.difference.half_width < row.test.deviation


def test_dense_row_is_the_one_model_all_started_from(comparison: Comparison) -> None:
    row = comparison.rows[0]
    assert row.variant == DENSE
    assert (row.sparsity, row.heads, row.layer_parameters) == (0, 16, DENSE_LAYERS)
    assert row.test.mean == 100
    assert math.isnan(row.test.deviation)
    assert row.paper == pytest.approx(23.24 - 24.85)


def test_order_is_the_papers(comparison: Comparison) -> None:
    assert [row.variant for row in comparison.rows] == [DENSE, *NAMES.values()]
    assert set(PAPER_DIFFERENCES) == {DENSE, *NAMES.values()} - {NAMES["full"]}
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
    comparison = compare([made_up(120, kept=12)], [])
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
    found = compare(runs, [])
    by_name = {run.name: variant for run, variant in zip(found.runs, found.variants, strict=True)}
    assert by_name == {
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
    assert len(set(compare(runs, []).variants)) == 1


def test_the_variant_comes_from_the_settings_not_from_the_label() -> None:
    comparison = compare([made_up(120, ablation="no_output_scaling")], [])
    assert comparison.variants == ["full method"]
    assert any("labelled ablation=no_output_scaling" in line for line in comparison.warnings)


def test_full_method_of_a_sweep_is_the_one_with_most_runs_then_the_papers() -> None:
    sweep = [
        made_up(120 + i, f"s{i}", 1, **{"gates.lambda_max": x}) for i, x in enumerate((0.01, 0.02, 0.03))
    ]
    found = compare(sweep, []).reference
    assert found is not None
    assert found["gates.lambda_max"] == 0.02
    more = [*sweep, made_up(119, "more", 2, **{"gates.lambda_max": 0.03})]
    found = compare(more, []).reference
    assert found is not None
    assert found["gates.lambda_max"] == 0.03


def test_without_the_full_method_there_are_no_differences() -> None:
    comparison = compare([made_up(120, "a", **OFF["scaling"]), made_up(121, "b", **OFF["init"])], [])
    assert all(row.difference is None for row in comparison.rows)
    assert any("full method" in line for line in comparison.warnings)


def test_seeds_that_only_one_variant_has_are_not_paired() -> None:
    runs = [made_up(120, "a", 1), made_up(121, "a", 2)]
    runs += [made_up(125, "b", 2, **OFF["init"]), made_up(900, "b", 3, **OFF["init"])]
    comparison = compare(runs, [])
    difference = rows_of(comparison)["without positive initialization"].difference
    assert difference is not None
    assert (difference.mean, difference.pairs) == (pytest.approx(4), 1)
    assert "full method lacks seed 3 that other variants have" in comparison.warnings


def test_other_differences_are_named_by_run_and_setting() -> None:
    runs = [
        made_up(120, "a", 1),
        made_up(121, "b", 2),
        made_up(122, "odd", 1, **OFF["init"], **{"optimizer.learning_rate": 0.5, "runs_folder": "elsewhere"}),
    ]
    (warning,) = [line for line in compare(runs, []).warnings if "differs" in line]
    assert warning == "optimizer.learning_rate differs: 0.5 in odd; 0.001 in the others"


def test_a_checkpoint_per_seed_is_expected_but_not_one_per_variant() -> None:
    def pair(first: str, second: str) -> list[str]:
        runs = [made_up(120, "a", 1, checkpoint="one"), made_up(121, "b", 2, checkpoint="two")]
        runs += [made_up(122, "c", 1, checkpoint=first, **OFF["init"])]
        runs += [made_up(123, "d", 2, checkpoint=second, **OFF["init"])]
        return [line for line in compare(runs, []).warnings if line.startswith("checkpoint")]

    assert pair("one", "two") == []
    assert pair("one", "one") != []


def test_what_varies_beside_the_gates_can_be_named() -> None:
    runs = [made_up(120, "a"), made_up(121, "b", **{"optimizer.learning_rate": 0.5})]
    with pytest.raises(
        InputError, match=r"runs/a-1 and runs/b-1 are both full method .* optimizer.learning_rate"
    ):
        compare(runs, [])
    comparison = compare(runs, [], ["optimizer.learning_rate"])
    assert sorted(comparison.variants) == ["full method", "learning rate 0.5"]
    assert comparison.warnings == []


@pytest.mark.parametrize(
    "text", [{"vocabulary_hash": "w" * 64}, {"data_fingerprint": "g" * 64}, {"tokens_scored": 998}]
)
def test_runs_on_different_texts_are_not_ranked(text: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"runs/a-1 .*; runs/b-1 .* choose those of one text by"):
        compare([made_up(120, "a"), made_up(121, "b", text=text, **OFF["init"])], [])
