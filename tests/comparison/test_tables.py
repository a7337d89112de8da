"""The table's forms: the same numbers in each, nothing in a name read as markup."""

import csv
import io
import re
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from support.made_up import config, history, result
from support.study_fixtures import PERPLEXITIES

from allattn.comparison.compared_run import Damaged, finished_run
from allattn.comparison.curves import At
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import (
    COLUMNS,
    csv_tables,
    equal_columns,
    notes,
    text_tables,
)
from allattn.comparison.text_tables import latex_tables, markdown_tables, terminal_tables

NASTY = r"50% of {a_b} & $x$ #1 ~^ \alpha | *b* [red] <i>"


def in_markdown(comparison: Comparison) -> str:
    return markdown_tables(text_tables(comparison), notes(comparison))


def in_latex(comparison: Comparison) -> str:
    return latex_tables(text_tables(comparison), notes(comparison))


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    runs, left_out = read_local_runs([study])
    return side_by_side(runs, left_out)


@pytest.fixture(scope="module")
def nasty() -> Comparison:
    """A setting that varies holds signs that mean something to LaTeX, Markdown, HTML or rich."""
    runs = [
        finished_run("a", "a", config("a"), result(120), history()),
        finished_run("b", "b", config("b", **{"data.tokenizer": NASTY}), result(121), history()),
        finished_run("c", "c", config("c", 2), result(122), history()),
    ]
    return side_by_side(runs, [], ["data.tokenizer"])


def printed(comparison: Comparison) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    for table in terminal_tables(text_tables(comparison)):
        console.print(table)
    return console.export_text()


def test_a_row_in_words(comparison: Comparison) -> None:
    """Mean, deviation and interval are worked out here again."""
    variants, equal = text_tables(comparison)
    row = dict(zip(COLUMNS, variants.rows[5], strict=True))
    values, full = list(PERPLEXITIES["three"].values()), list(PERPLEXITIES["full"].values())
    pairs = [value - other for value, other in zip(values, full, strict=True)]
    middle, half = statistics.mean(pairs), 4.302653 * statistics.stdev(pairs) / 3**0.5
    assert row["variant"] == "without all three"
    assert row["seeds"] == "1, 2, 3"
    assert row["sparsity"] == "25.0%"
    assert row["heads kept"] == "12/16"
    assert row["test perplexity"] == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    best = statistics.mean(values) - 5
    assert row["best valid. perplexity"] == f"{best:.2f} ± {statistics.stdev(values):.2f} @ 300"
    assert row["last valid. perplexity"].endswith("@ 400")
    there = dict(zip(equal_columns(At.heads), equal.rows[4], strict=True))
    assert there["method"] == "without all three"
    assert (there["heads kept by its runs"], there["compared at"], there["seeds"]) == ("12", "12", "1, 2, 3")
    assert there["test perplexity there"] == row["test perplexity"]
    interval = f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}], n = 3"
    assert there["difference over seeds"] == interval
    assert there["paper's"] == "+1.48"


def test_terminal_shows_every_cell(comparison: Comparison) -> None:
    text = printed(comparison)
    assert all(cell in text for table in text_tables(comparison) for row in table.rows for cell in row)


def test_markdown_has_one_cell_per_column(comparison: Comparison, nasty: Comparison) -> None:
    for made in (comparison, nasty):
        lines = [line for line in in_markdown(made).splitlines() if line.startswith("|")]
        wanted = [len(t.columns) + 1 for t in text_tables(made) for _ in range(2 + len(t.rows))]
        assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == wanted
    assert "| without output scaling | 1, 2, 3 | 25.0% | 12/16 |" in markdown_tables(
        text_tables(comparison), notes(comparison)
    )


def test_latex_is_a_whole_booktabs_table(comparison: Comparison) -> None:
    lines = in_latex(comparison).splitlines()
    assert lines.count(r"\end{tabular}") == 2
    body = [line for line in lines if not line.startswith("%")]
    body = body[: 1 + body.index(r"\end{tabular}")]
    assert body[0] == r"\begin{tabular}{l" + "r" * (len(COLUMNS) - 1) + "}"
    assert [body[1], body[3], body[-2], body[-1]] == [
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    rows = [body[2], *body[4:-2]]
    assert len(rows) == 1 + len(comparison.rows)
    for row in rows:
        assert row.endswith(r" \\")
        assert len(re.findall(r"(?<!\\)&", row)) == len(COLUMNS) - 1
    assert r"25.0\% & 12/16" in rows[2]
    full, other = PERPLEXITIES["full"].values(), PERPLEXITIES["warm-up"].values()
    middle = statistics.mean(other) - statistics.mean(full)
    assert f"$+${middle:.2f} [" in in_latex(comparison)


def test_latex_escapes_what_it_would_read(nasty: Comparison) -> None:
    row = next(line for line in in_latex(nasty).splitlines() if "tokenizer" in line)
    name = row.split(" & 1 &")[0]
    assert name == (
        r"tokenizer 50\% of \{a\_b\} \& \$x\$ \#1 \textasciitilde{}\textasciicircum{} \textbackslash{}alpha "
        r"| *b* [red] $<$i$>$"
    )


def test_names_are_no_markup(nasty: Comparison) -> None:
    assert f"tokenizer {NASTY}" in printed(nasty)
    assert r"\| \*b\* [red] \<i\>" in in_markdown(nasty)


def test_csv_has_full_precision(comparison: Comparison) -> None:
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO(csv_tables(comparison)["table.csv"]))}
    assert len(rows) == 6
    for row in comparison.rows:
        read = rows[row.label]
        assert float(read["test_perplexity"]) == row.test.mean
        assert float(read["parameters_layers"]) == row.layer_parameters
    equal = csv.DictReader(io.StringIO(csv_tables(comparison)["equal_size.csv"]))
    for made, read in zip(comparison.equal, equal, strict=True):
        assert (read["method"], read["at"], float(read["size"])) == (made.label, "heads", 12)
        if made.difference is None:
            assert read["difference"] == ""
        else:
            assert float(read["difference"]) == made.difference.mean
            assert float(read["difference_half_width_95"]) == made.difference.half_width
            assert read["difference_pairs"] == "3"
    assert rows["full method"]["best_valid_steps"] == "300 300 300"
    assert rows["dense, before pruning"]["test_perplexity_standard_deviation"] == ""


def test_every_mean_can_be_worked_out_from_the_runs(comparison: Comparison) -> None:
    """runs.csv alone gives the table's means, deviations and differences again."""
    runs = list(csv.DictReader(io.StringIO(csv_tables(comparison)["runs.csv"])))
    assert len(runs) == 15
    for row in comparison.rows[1:]:
        own = {run["seed"]: float(run["test_perplexity"]) for run in runs if run["variant"] == row.label}
        assert statistics.mean(own.values()) == pytest.approx(row.test.mean, rel=1e-12)
        assert statistics.stdev(own.values()) == pytest.approx(row.test.deviation, rel=1e-12)


def test_notes_say_which_settings_are_the_full_method(comparison: Comparison) -> None:
    assert notes(comparison)[0] == (
        "full method: all three techniques, lambda 0.02, lambda warm-up steps 75, initial pi 2"
    )


def test_notes_say_how_runs_were_scored_where_they_recorded_it(comparison: Comparison) -> None:
    assert not any("scored" in note for note in notes(comparison)), "results of an older version"
    record = result(120)
    record["corpus"]["unseen_words"] = {"test": {"count": 79, "share": 0.079}}
    how = {"mode": "memory", "memory_length": 32, "segment_length": 64, "eos_is_a_word": True}
    how |= {"precision": "float32", "device": "cpu AVX2", "core": "plain"}
    record["pruned"]["evaluation"] = how
    here = finished_run("a", "a", config("a"), record, history())
    record["pruned"]["evaluation"] = how | {"device": "cuda"}
    there = finished_run("b", "b", config("b", 2), record, history())
    line = "scored 999 test tokens: mode memory, memory length 32, segment length 64; <eos> scored as a word"
    assert notes(side_by_side([here, there], []))[-3:] == [
        f"{line}; float32, cpu AVX2, plain core",
        f"{line}; float32, cuda, plain core",
        "unseen words, scored as <unk>: 7.9% of the test text's words",
    ]
    del record["pruned"]["evaluation"]["mode"]
    with pytest.raises(Damaged, match="its result lacks mode"):
        finished_run("c", "c", config("c"), record, history())
