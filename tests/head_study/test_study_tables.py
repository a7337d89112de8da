"""A made-up study in all its tables: every number stands where it belongs."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allattn.comparison.text_tables import TextTable, latex_tables, markdown_tables
from allattn.comparison.upload import Destination
from allattn.head_study import report
from allattn.head_study.pictures import captions, draw_pictures
from allattn.head_study.reading import LayerReading, Reading
from allattn.head_study.report import upload_report, write_report
from allattn.head_study.result import Agreement, ClosedByGates, Mask, Measured, Point, StudyResult
from allattn.head_study.tables import csv_tables, notes, text_tables
from allattn.training.config import WandbMode


def measured(share: float, perplexity: float, accuracy: float) -> Measured:
    return Measured(share, 100 * math.log(perplexity), 100, {"quiz acc": accuracy, "quiz bits": 3.0})


READ = LayerReading(0, [1.0, 2.0], [3.0, 4.0], [0.25, 0.75], 0.5, [[1.0, 0], [0, 1.0]], 9.0, 3.0, 60.0, 70.0)


@pytest.fixture(scope="module")
def result() -> StudyResult:
    static, dynamic = Mask.static, Mask.dynamic
    points = {
        Point(static, "random", 0.25, 1): measured(0.25, 60, 0.4),
        Point(static, "random", 0.25, 2): measured(0.25, 80, 0.5),
        Point(static, "ahon_ln", 0.25): measured(0.25, 41, 0.694),
        Point(static, "ahon_ln", 0.5): measured(0.5, 46, 0.67),
        Point(dynamic, "ahon_ln", 0.25): measured(0.2, 40.2, 0.7),
    }
    return StudyResult(
        "a model",
        [2, 2],
        measured(0, 40, 0.7),
        points,
        {"ahon_ln": [[1.5, 0.5], [0.25, 1.75]]},
        [Agreement("ahon_ln", "wanda", 0.5, 2, 1, 1.0)],
        [ClosedByGates("ahon_ln", None, 4, 2, 2, 1.0), ClosedByGates("ahon_ln", 0, 2, 1, 1, 0.5)],
        Reading([READ], 0, [[1.0, 2.0]] * 2, [[3.0]] * 2),
        {"share": "0.25, 0.5"},
        ["test: 100 tokens"],
    )


@pytest.fixture(scope="module")
def tables(result: StudyResult) -> dict[str, TextTable]:
    return {table.name: table for table in text_tables(result)}


def test_perplexities_with_their_crossings_and_areas(tables: dict[str, TextTable]) -> None:
    """+1 % is 40.4, +5 % is 42, +10 % is 44; both scores reach 25 %."""
    table = tables["static_perplexity"]
    assert table.columns == ("score", "0.25 asked", "0.5 asked", "+1%", "+5%", "+10%", "area")
    areas = [f"{math.log(perplexity / 40) / 2:.4f}" for perplexity in (41, 70)]
    assert table.rows == [
        ["ahon_ln", "41.00 at 25.0%", "46.00 at 50.0%", "10.0%", "30.0%", "40.0%", areas[0]],
        ["random", "70.00 ± 14.14 at 25.0%", "", "0.3%", "1.7%", "3.3%", areas[1]],
    ]
    assert "unmasked 40.00" in table.title
    dynamic = tables["dynamic_perplexity"].rows[0]
    assert dynamic[:5] == ["ahon_ln", "40.20 at 20.0%", "≥ 20.0%", "≥ 20.0%", "≥ 20.0%"]


def test_accuracy_falls_by_one_point(tables: dict[str, TextTable]) -> None:
    """0.69 lies a sixth of the way from 0.694 to 0.67; bits are no accuracy."""
    table = tables["static_quiz_acc"]
    assert table.rows[0] == ["ahon_ln", "0.6940 at 25.0%", "0.6700 at 50.0%", "29.2%", "0.6970"]
    assert not any("bits" in name for name in tables)


def test_other_tables_and_what_they_mean(result: StudyResult, tables: dict[str, TextTable]) -> None:
    assert tables["agreement"].rows == [["ahon_ln", "+0.50, 1 (1.0)"]]
    assert tables["closed_by_gates"].rows == [["ahon_ln", "2 of 2 (1.0)", "1 of 1 (0.5)"]]
    assert tables["reading"].rows[0][-4:] == ["9.0", "3.0", "60.00", "70.00"]
    said = " ".join(notes(result))
    assert "saves no time" in said
    assert "not the L0 prune" in said
    assert "4 heads in 2 layers" in said
    assert r"±" in markdown_tables(list(tables.values()), notes(result))
    assert r"\begin{tabular}" in latex_tables(list(tables.values()), notes(result))


def test_numbers_in_full(result: StudyResult) -> None:
    files = {name: list(csv.DictReader(io.StringIO(text))) for name, text in csv_tables(result).items()}
    assert len(files["points.csv"]) == 6
    assert float(files["points.csv"][3]["nats"]) == 100 * math.log(41)
    ahon_ln = files["summary.csv"][0]
    assert float(ahon_ln["perplexity +1%"]) == pytest.approx(0.1)
    assert float(ahon_ln["quiz acc one point"]) == pytest.approx(0.25 + 0.25 / 6)
    assert [float(row["ahon_ln"]) for row in files["heads.csv"]] == [1.5, 0.5, 0.25, 1.75]
    assert [row["block_norm"] for row in files["heads.csv"]] == ["1.0", "2.0", "", ""]


def test_a_model_that_breaks_down(result: StudyResult) -> None:
    """Infinite perplexities are shown as such."""
    broken = {
        **result.points,
        Point(Mask.static, "random", 0.25, 2): Measured(0.25, 1e6, 100, {"quiz acc": 0}),
    }
    found = replace(result, points=broken)
    cells = text_tables(found)[0].rows[1]
    assert cells[1] == "inf at 25.0%"
    assert cells[3:] == ["0.0%", "0.0%", "0.0%", "inf"]
    assert "inf" in csv_tables(found)["points.csv"]
    assert draw_pictures(found)


def test_every_picture_has_its_caption(result: StudyResult) -> None:
    figures = draw_pictures(result)
    assert set(figures) <= set(captions(result))
    lines = {tuple(line.get_xdata()) for line in figures["curves_perplexity"].axes[0].lines}
    assert lines == {(0.0, 0.25, 0.5), (0.0, 0.25)}


def test_the_report_goes_to_wandb_as_a_job_of_its_own(
    result: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it hands to the client, whose side the comparison's tests look at."""
    handed: list[Any] = []
    monkeypatch.setattr(report, "log_report", lambda *words: handed.extend(words) or "")
    monkeypatch.setattr(
        report, "draw_pictures", lambda found: {"agreement": draw_pictures(found)["agreement"]}
    )
    images = write_report(result, tmp_path)
    destination = Destination("me", "heads", None)
    upload_report(result, images, tmp_path, WandbMode.offline, destination)
    job, name, settings, tables, pictures, summary, folder, mode, where = handed
    assert (job, name, settings) == ("study", "head study of a model", result.settings)
    assert [table.name for table in tables] == [table.name for table in text_tables(result)]
    assert pictures == {"agreement": tmp_path / "agreement.png"}
    assert pictures["agreement"].is_file()
    assert summary["perplexity/static/random/0.25/seed_2"] == pytest.approx(80)
    assert summary["perplexity"] == pytest.approx(40)
    assert (folder, mode, where) == (tmp_path, WandbMode.offline, destination)
    page = (tmp_path / "report.html").read_text()
    assert "saves no time" in page
    assert "<td>0.25, 0.5</td>" in page
