from pathlib import Path

import pytest

from allattn.training.metrics import CsvMetrics, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Steps 10, 20, 30; the validation column begins at 20."""
    path = tmp_path / "metrics.csv"
    metrics = CsvMetrics(path)
    metrics.log_metrics({"loss": 3.5, "phase": "gates"}, 10)
    metrics.log_metrics({"loss": 3.25, "valid_loss": 4.0, "phase": "gates"}, 20)
    metrics.log_metrics({"loss": 1 / 3, "phase": "fine_tune"}, 30)
    return path


def test_rows_as_written(path: Path) -> None:
    assert read_metrics(path) == [
        {"step": "10", "loss": "3.5", "phase": "gates"},
        {"step": "20", "loss": "3.25", "valid_loss": "4.0", "phase": "gates"},
        {"step": "30", "loss": str(1 / 3), "phase": "fine_tune"},
    ]
    assert path.read_text().splitlines() == [
        "step,loss,phase,valid_loss",
        "10,3.5,gates,",
        "20,3.25,gates,4.0",
        f"30,{1 / 3},fine_tune,",
    ]


def test_resume_drops_the_rows_after_the_checkpoint(path: Path) -> None:
    CsvMetrics(path, keep_until=20).log_metrics({"loss": 9.0, "sparsity": 0.5}, 25)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        ("10", "3.5"),
        ("20", "3.25"),
        ("25", "9.0"),
    ]
    assert read_metrics(path)[-1]["sparsity"] == "0.5"


def test_typed_rows_are_those_that_were_logged_up_to_the_checkpoint(path: Path) -> None:
    metrics = CsvMetrics(path, keep_until=20)
    metrics.log_metrics({"open_heads": 3, "loss": 1e-7, "valid_heads": "1", "rate": float("inf")}, 25)
    assert metrics.typed_rows() == [
        {"step": 10, "loss": 3.5, "phase": "gates"},
        {"step": 20, "loss": 3.25, "valid_loss": 4.0, "phase": "gates"},
        {"step": 25, "open_heads": 3, "loss": 1e-7, "valid_heads": "1", "rate": float("inf")},
    ]


def test_a_first_start_empties_the_file(path: Path) -> None:
    CsvMetrics(path)
    assert read_metrics(path) == []


@pytest.mark.parametrize("tail", ["4", "40,", "40,2.5", "40,2.5,fine", "40,2.5,fine_tune"])
def test_a_half_written_last_row_is_dropped(path: Path, tail: str) -> None:
    with path.open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(path)] == ["10", "20", "30"]
    CsvMetrics(path, keep_until=40).log_metrics({"loss": 2.0}, 41)
    assert [row["step"] for row in read_metrics(path)] == ["10", "20", "30", "41"]


def test_a_row_cut_in_its_last_cell_is_dropped(path: Path) -> None:
    with path.open("a") as file:
        file.write("40,2.5,fine_tune,4.1")  # of 4.125
    assert [row["step"] for row in read_metrics(path)] == ["10", "20", "30"]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.csv") == []
