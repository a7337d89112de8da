"""Differences at equal size: made-up curves whose values at the asked size are known by hand."""

from typing import Any

import pytest
from support.made_up import OFF, config, history, result

from allattn.comparison.compared_run import ComparedRun, finished_run
from allattn.comparison.curves import At
from allattn.comparison.equal_size import EqualRow
from allattn.comparison.side_by_side import side_by_side
from allattn.comparison.tables import text_tables


def sweep(method: str, seed: int, perplexities: dict[int, float], **about: Any) -> list[ComparedRun]:
    """A run per number of heads kept, at lambdas of their own: the fewer heads, the larger lambda."""
    runs = []
    for kept, perplexity in perplexities.items():
        settings = config("r", seed, **OFF[method], **{"gates.lambda_max": 0.02 + 0.001 * (12 - kept)})
        where = f"{method}/{seed}/{kept}"
        run = finished_run(where, where, settings, result(perplexity, kept, **about), history())
        assert isinstance(run, ComparedRun)
        runs.append(run)
    return runs


def rows(runs: list[ComparedRun], at: At = At.heads, at_sparsity: float | None = None) -> dict[str, EqualRow]:
    return {row.label: row for row in side_by_side(runs, [], (), at, at_sparsity).equal}


FULL = {1: {8: 130.0, 12: 120.0}, 2: {8: 134.0, 12: 122.0}}


def full() -> list[ComparedRun]:
    return [run for seed, perplexities in FULL.items() for run in sweep("full", seed, perplexities)]


def test_each_seed_is_read_off_its_own_line() -> None:
    """At 10 heads the full method has (130 + 120) / 2 = 125 and (134 + 122) / 2 = 128."""
    runs = [*full(), *sweep("scaling", 1, {4: 150.0, 16: 114.0}), *sweep("scaling", 2, {10: 130.0})]
    found = rows(runs, at_sparsity=0.375)
    assert (found["full method"].asked, found["full method"].seeds) == (10, [1, 2])
    assert found["full method"].test is not None
    assert found["full method"].test.mean == pytest.approx(126.5)
    row = found["without output scaling"]
    # seed 1 halfway from 150 to 114 is 132, 7 above; seed 2 stands there, 2 above
    assert row.difference is not None
    assert (row.difference.mean, row.difference.pairs) == (pytest.approx(4.5), 2)
    assert row.difference.half_width == pytest.approx(12.706205 * 5 / 2**0.5 / 2**0.5, rel=1e-6)


def test_without_a_sparsity_the_full_methods_mean_is_asked() -> None:
    """Of the runs at the full method's own lambda, not of its whole sweep: 12 heads of both seeds."""
    runs = [*full(), *sweep("full", 3, {12: 121.0}), *sweep("init", 1, {11: 126.0, 13: 124.0})]
    row = rows(runs)["without positive initialization"]
    assert row.asked == 12
    assert row.difference is not None
    assert (row.difference.mean, row.difference.pairs) == (pytest.approx(5), 1)


def test_nothing_is_read_beyond_a_seeds_own_runs() -> None:
    """Seed 1 reaches 10 heads between its runs; seed 2, all of whose runs keep more, does not."""
    runs = [*full(), *sweep("scaling", 1, {9: 131.0, 11: 129.0}), *sweep("scaling", 2, {11: 1.0, 13: 2.0})]
    row = rows(runs, at_sparsity=0.375)["without output scaling"]
    assert row.seeds == [1]
    assert row.difference is not None
    assert (row.difference.mean, row.difference.pairs) == (pytest.approx(5), 1)


def test_methods_of_different_sizes_have_no_difference_and_the_cell_says_where_they_stand() -> None:
    comparison = side_by_side([*full(), *sweep("scaling", 1, {14: 115.0, 16: 114.0})], [])
    row = comparison.equal[1]
    assert (row.test, row.difference, row.seeds) == (None, None, [])
    cells = text_tables(comparison)[1].rows[1]
    assert cells == ["without output scaling", "14–16", "12", "", "", "none: 14–16 against 8–12", "", "+1.25"]


def test_two_runs_of_one_size_count_as_their_mean() -> None:
    twice = sweep("init", 1, {12: 124.0})
    settings = config("r", 1, **OFF["init"], **{"gates.lambda_max": 0.5})
    twice.append(finished_run("x", "x", settings, result(128.0, 12), history()))  # type: ignore[arg-type]
    row = rows([*full(), *twice])["without positive initialization"]
    assert row.test is not None
    assert row.test.mean == pytest.approx(126)


def test_lambda_and_the_targets_value_make_no_method_but_having_a_target_does() -> None:
    changes = [{}, {"gates.lambda_max": 0.5}, {"gates.target_sparsity": 0.25}, {"gates.target_sparsity": 0.5}]
    changes += [{"gates.selection": "random", "gates.target_sparsity": share} for share in (0.25, 0.5)]
    runs = [
        finished_run(str(i), str(i), config("r", 1, **each), result(120), history())
        for i, each in enumerate(changes)
    ]
    methods = {each.run.name: each.method for each in side_by_side(runs, []).placed}
    assert [methods[str(i)] for i in range(6)] == [
        *["full method"] * 2,
        *["target"] * 2,
        *["random selection"] * 2,
    ]


def test_at_equal_parameters_or_time_a_sparsity_is_the_full_methods_size_there() -> None:
    """A head is 2,304 parameters, and takes 3 microseconds in the full method and 2 in the other."""
    runs = [run for seed, own in FULL.items() for run in sweep("full", seed, own, microseconds=3.0)]
    runs += sweep("scaling", 1, {8: 131.0, 12: 123.0, 16: 119.0}, microseconds=2.0)
    row = rows(runs, At.parameters, 0.375)["without output scaling"]
    assert row.asked == 4 * 4 * 2_304 + 1_000 - 6 * 2_304
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(127 - 125)
    row = rows(runs, At.layer_time, 0.375)["without output scaling"]
    assert row.asked == pytest.approx(30)
    # 30 microseconds are 15 heads of the other: three quarters of the way from 123 to 119
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(120 - 125)


def test_where_no_time_was_measured_none_is_compared() -> None:
    comparison = side_by_side([*full(), *sweep("scaling", 1, {12: 123.0})], [], (), At.layer_time)
    assert [row[1] for row in text_tables(comparison)[1].rows] == ["not measured"] * 2


def test_the_texts_doubt_is_shown_where_both_runs_kept_their_articles() -> None:
    def run(method: str, seed: int, nats: list[float]) -> ComparedRun:
        kept = {"pruned": {"test": {"unit": "articles", "nats": nats, "tokens": [10, 10, 10]}}}
        settings = config("r", seed, **OFF[method])
        found = finished_run(f"{method}{seed}", f"{method}{seed}", settings, result(120), history(), kept)
        assert isinstance(found, ComparedRun)
        return found

    runs = [run("full", 1, [10.0, 12, 13]), run("scaling", 1, [11.0, 13, 14])]
    text = rows(runs)["without output scaling"].text
    assert text is not None
    assert text.articles == 3
    assert text.low <= text.difference <= text.high
    # every article is a tenth of a nat per token worse: each redrawn text shows it
    assert text.low > 0
    between = sweep("scaling", 1, {11: 121.0, 13: 119.0})
    assert rows([runs[0], *between])["without output scaling"].text is None, "no run of 12 heads"
