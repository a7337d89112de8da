"""lm_eval.json beside result.json becomes columns, in every form: means over seeds, pruned and dense."""

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.made_up import config, dense_run, history, result, write_run

from allattn.commands.compare import PIPED_WIDTH
from allattn.comparison.page import html_page
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import (
    csv_tables,
    notes,
    run_cells,
    run_columns,
    text_tables,
)
from allattn.comparison.text_tables import latex_tables, markdown_tables, terminal_tables

ACCURACY = {1: 0.61, 2: 0.64, 3: 0.62}


def record(documents: int = 50, **metrics: float) -> dict[str, Any]:
    """What `allattn lm-eval` writes."""
    return {
        "checkpoint": "last.ckpt",
        "tasks": {"quiz": metrics},
        "documents": {"quiz": documents},
        "few_shot": {"quiz": 0},
        "versions": {"quiz": 1},
        "max_length": 2048,
        "seed": 1,
    }


def keep(folder: Path, found: Any) -> None:
    (folder / "lm_eval.json").write_text(json.dumps(found))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds with accuracy, two with a perplexity too, a variant with neither, their dense model."""
    for seed, accuracy in ACCURACY.items():
        made = write_run(tmp_path / f"r{seed}", config(f"r{seed}", seed), result(120 + seed), history())
        more = {"word_perplexity": 140.0 + seed} if seed < 3 else {"word_perplexity": float("nan")}
        keep(made, record(acc=accuracy, acc_stderr=0.02, **more))
    without = config("other", 1, **{"gates.initial_pi": 0.0})
    write_run(tmp_path / "other", without, result(130), history())
    dense = write_run(tmp_path / "dense", *dense_run(100.0), None)
    keep(dense, record(acc=0.7))
    return tmp_path


def compared(folder: Path) -> Comparison:
    found, left_out = read_local_runs([folder])
    assert left_out == []
    return side_by_side(found, [])


def test_a_column_per_metric_in_every_form(runs: Path) -> None:
    comparison = compared(runs)
    table = text_tables(comparison)[0]
    assert table.columns[-2:] == ("quiz acc", "quiz word_perplexity")
    cells = {row[0]: row[-2:] for row in table.rows}
    values = list(ACCURACY.values())
    accuracy = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert cells == {
        "dense, before pruning": ["0.7000", ""],
        "full method": [accuracy, f"141.50 ± {0.5**0.5:.2f} (n = 2)"],
        "without positive initialization": ["", ""],
    }
    console = Console(width=PIPED_WIDTH, file=io.StringIO(), record=True)
    console.print(terminal_tables([table])[0])
    for text in (console.export_text(), markdown_tables([table], []), html_page(comparison, {})):
        assert accuracy in text
    assert accuracy.replace("±", r"$\pm$") in latex_tables([table], [])
    assert r"quiz word\_perplexity" in latex_tables([table], [])
    assert any("lm-evaluation-harness" in note for note in notes(comparison))
    assert not any("quiz" in line for line in comparison.warnings)


def test_numbers_in_full_and_of_each_run(runs: Path) -> None:
    comparison = compared(runs)
    tables = csv_tables(comparison)
    row = {row["variant"]: row for row in csv.DictReader(io.StringIO(tables["table.csv"]))}["full method"]
    assert float(row["quiz acc"]) == statistics.fmean(ACCURACY.values())
    assert float(row["quiz acc_standard_deviation"]) == statistics.stdev(ACCURACY.values())
    assert (row["quiz acc_models"], row["quiz word_perplexity_models"]) == ("3", "2")
    of_runs = {row["run"]: row["quiz acc"] for row in csv.DictReader(io.StringIO(tables["runs.csv"]))}
    assert of_runs == {"r1": "0.61", "r2": "0.64", "r3": "0.62", "other": ""}
    cells = [dict(zip(run_columns(comparison), row, strict=True)) for row in run_cells(comparison)]
    assert {each["run"]: each["quiz acc"] for each in cells}["r2"] == "0.6400"


def test_no_column_without_results(tmp_path: Path) -> None:
    write_run(tmp_path / "r", config("r"), result(120), history())
    comparison = compared(tmp_path)
    assert not any("quiz" in column for table in text_tables(comparison) for column in table.columns)
    assert not any("harness" in note for note in notes(comparison))


def test_results_of_other_documents_are_named(runs: Path) -> None:
    keep(runs / "r2", record(documents=10, acc=0.9))
    (line,) = [line for line in compared(runs).warnings if "quiz" in line]
    assert line == "quiz: its results were not all measured with the same documents"


@pytest.mark.parametrize("found", [[], {}, {"tasks": [1]}, {"tasks": {"quiz": {"acc": "high"}}}])
def test_a_damaged_record_is_named(runs: Path, found: Any) -> None:
    keep(runs / "r2", found)
    read, (left,) = read_local_runs([runs])
    assert len(read) == 4
    assert (left.where, "lm_eval.json cannot be read" in left.why) == (str(runs / "r2"), True)
