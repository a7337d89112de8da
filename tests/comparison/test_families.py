"""Dense and pruned models of two families in one table, and differences at equal parameters."""

from typing import Any

import pytest
from support.made_up import DENSE_LAYERS, PER_HEAD, config, dense_run, history, result

from allattn.comparison.compared_run import DenseRun, FinishedRun, finished_run
from allattn.comparison.pictures import draw_pictures
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import text_tables

XL = "Transformer-XL"
HALF = DENSE_LAYERS - 8 * PER_HEAD  # parameters of the layers with 8 of 16 heads


def pruned(name: str, seed: int, perplexity: float, kept: int = 8, **about: Any) -> FinishedRun:
    settings = config(name, seed, checkpoint=f"{about.get('family', 'ours')}-{seed}")
    return finished_run(
        f"{name}-{seed}", f"{name}-{seed}", settings, result(perplexity, kept, **about), history()
    )


def dense(name: str, seed: int, perplexity: float, **about: Any) -> FinishedRun:
    return finished_run(f"{name}-{seed}", f"{name}-{seed}", *dense_run(perplexity, seed, **about), [])


@pytest.fixture(scope="module")
def architectures() -> Comparison:
    """Two seeds: All-attention dense and pruned to half; Transformer-XL dense, pruned and narrow."""
    runs = []
    for seed in (1, 2):
        runs += [
            pruned("ours", seed, 110.0 + seed, dense=100.0 + seed, microseconds=2.0),
            pruned("xl", seed, 120.0 + seed, dense=101.0 + 2 * seed, family=XL, microseconds=3.0),
            dense("dense", seed, 100.0 + seed),
            dense("narrow", seed, 114.0 + 3 * seed, family=XL, size=HALF + 100),
        ]
    return side_by_side(runs, [])


def test_both_families_stand_in_one_table_dense_and_pruned(architectures: Comparison) -> None:
    large, narrow = f"{XL} of {DENSE_LAYERS:,}", f"{XL} of {HALF + 100:,}"
    assert {
        row.label: (row.test.mean, row.layer_parameters, row.layer_microseconds) for row in architectures.rows
    } == {
        "All-attention, dense": (101.5, DENSE_LAYERS, 32),
        f"{large}, dense": (104, DENSE_LAYERS, 48),
        f"{narrow}, dense": (118.5, HALF + 100, None),
        "All-attention, full method": (111.5, HALF, 16),
        f"{large}, full method": (121.5, HALF, 24),
    }
    by_label = {row.label: row for row in architectures.rows}
    assert all(row.seeds == [1, 2] for row in by_label.values())
    assert by_label["All-attention, dense"].updates == 1_600
    assert by_label[f"{large}, dense"].updates is None, "its own run is not here"
    assert architectures.warnings == []
    assert architectures.left_out == []


def test_families_are_compared_at_equal_parameters(architectures: Comparison) -> None:
    """Of one size the runs' own perplexities count; sizes within a percent are one."""
    found = {row.row.label: row.difference for row in architectures.families}
    large, narrow = f"{XL} of {DENSE_LAYERS:,}", f"{XL} of {HALF + 100:,}"
    assert set(found) == {f"{large}, dense", f"{narrow}, dense", f"{large}, full method"}
    means = {label: None if each is None else (each.mean, each.pairs) for label, each in found.items()}
    assert means[f"{large}, dense"] == (pytest.approx(2.5), 2)  # 103 - 101 and 105 - 102
    assert means[f"{large}, full method"] == (pytest.approx(10), 2)
    own = [111 - 10 * 100 / (8 * PER_HEAD), 112 - 10 * 100 / (8 * PER_HEAD)]  # from half towards dense
    assert means[f"{narrow}, dense"] == (pytest.approx((117 + 120 - sum(own)) / 2), 2)
    assert text_tables(architectures)[2].rows[0][0] == f"{large}, dense"


def test_a_size_that_the_reference_does_not_reach_has_no_difference() -> None:
    runs = [pruned("ours", 1, 110.0), dense("tiny", 1, 150.0, family=XL, size=HALF - 5_000)]
    comparison = side_by_side(runs, [])
    assert comparison.families[0].difference is None
    reason = f"none: All-attention has {HALF:,}–{DENSE_LAYERS:,}"
    assert text_tables(comparison)[2].rows[0][3] == reason


def test_each_family_has_a_full_method_of_its_own(architectures: Comparison) -> None:
    assert [(row.label, row.asked, row.difference) for row in architectures.equal] == [
        ("All-attention, full method", 8, None),
        (f"{XL} of {DENSE_LAYERS:,}, full method", 8, None),
    ]


def test_points_are_labelled_by_family_dense_and_pruned(architectures: Comparison) -> None:
    parameters, time, _ = draw_pictures(architectures)["perplexity"].axes
    large, narrow = f"{XL} of {DENSE_LAYERS:,}", f"{XL} of {HALF + 100:,}"
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (parameters, time)]
    timed = ["All-attention, dense", f"{large}, dense"]
    both = ["All-attention, full method (pruned)", f"{large}, full method (pruned)"]
    assert legends == [[*timed, f"{narrow}, dense", *both], [*timed, *both]]
    assert "microseconds" in time.get_xlabel()


def test_dense_runs_that_do_not_belong_are_named() -> None:
    runs = [
        pruned("ours", 1, 110.0, dense=100.0),
        dense("same", 1, 100.0),
        dense("again", 1, 99.0),
        dense("foreign", 1, 98.0, vocabulary_hash="w" * 64),
    ]
    comparison = side_by_side(runs, [])
    assert [(run.where, run.why) for run in comparison.left_out] == [
        ("foreign-1", "a dense model of another text or vocabulary, or with other tokens scored"),
        ("again-1", "another dense model of its family and size takes part with seed 1"),
    ]
    assert [row.label for row in comparison.rows] == ["dense, before pruning", "full method"]
    assert comparison.families == []


def test_a_dense_run_that_was_evaluated_otherwise_is_said() -> None:
    settings, record = dense_run(150.0, family=XL)
    settings["eval"] = settings["eval"] | {"mode": "window"}
    other = finished_run("other", "other", settings, record, [])
    assert isinstance(other, DenseRun)
    warnings = side_by_side([pruned("ours", 1, 110.0), other], []).warnings
    assert warnings == ["other, a dense run, was evaluated by other settings"]


def test_results_that_name_no_family_are_of_all_attention() -> None:
    record = result(110.0)
    for model in ("dense", "pruned"):
        del record[model]["family"]
    run = finished_run("old", "old", config(), record, history())
    assert run.dense.family == "All-attention"
