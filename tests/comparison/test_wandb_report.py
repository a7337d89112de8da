"""The comparison as a W&B report: what its specification holds, and that W&B's own library puts it up."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.logged_fixtures import PATH, as_logged
from support.run_fixtures import Runs
from support.wandb_stand_in import StandIn

from allattn.commands import compare
from allattn.commands.compare import CompareSettings, compare_runs
from allattn.comparison import wandb_report
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import side_by_side
from allattn.comparison.tables import text_tables
from allattn.comparison.wandb_report import HEADS_KEPT, OPEN_HEADS, OVER_STEPS, PERPLEXITY, STEP, save_report
from allattn.errors import InputError
from allattn.training.flat_names import flat
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder


@pytest.fixture
def _library() -> None:
    pytest.importorskip("wandb_workspaces", reason='needs the extra: pip install "allattn[reports]"')


@pytest.mark.usefixtures("_library")
def test_the_report_holds_tables_panels_and_run_sets(
    stand_in: StandIn,
    sweep: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the command puts it up; run sets are the variants and hold their runs by id."""
    stand_in.runs += [as_logged(folder) for folder in sorted(sweep.iterdir())]
    monkeypatch.setattr(compare, "draw_pictures", lambda comparison: {})  # the report has none
    settings = CompareSettings(wandb=PATH, group="study", report=True, folder=str(tmp_path / "out"))
    comparison = compare_runs(settings)
    (put,) = stand_in.reports
    assert (put["entityName"], put["projectName"]) == tuple(PATH.split("/"))
    assert (put["displayName"], put["type"]) == ("Comparison of study", "runs")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("W&B report: ")
    assert "/someone/study/reports/Comparison-of-study--" in line
    blocks = put["spec"]["blocks"]
    tables, warnings, left_out = (block["content"] for block in blocks if block["type"] == "markdown-block")
    assert (tmp_path / "out" / "table.md").read_text() == tables
    assert warnings.count("- ") == len(comparison.warnings) > 0
    assert "y-silent" in left_out
    for table in text_tables(comparison):
        assert table.title in tables
    over_steps, against_heads = (block["metadata"] for block in blocks if block["type"] == "panel-grid")
    for grid in (over_steps, against_heads):
        held = {each["name"]: each["filters"]["filters"] for each in grid["runSets"]}
        assert held == {
            label: [
                {
                    "key": {"section": "run", "name": "name"},
                    "op": "IN",
                    "value": [run.name for run in comparison.of(label)],
                    "disabled": False,
                }
            ]
            for label in comparison.labels()
        }
    assert all(len(each["grouping"]) == 1 for each in over_steps["runSets"])
    drawn = [panel["config"] for panel in over_steps["panelBankSectionConfig"]["panels"]]
    layers = range(4)
    names = [*OVER_STEPS, *map(OPEN_HEADS.format, layers)]
    assert [(config["xAxis"], config["metrics"]) for config in drawn] == [(STEP, [name]) for name in names]
    (scatter,) = against_heads["panelBankSectionConfig"]["panels"]
    assert scatter["config"]["xAxis"] == f"summary:{HEADS_KEPT}"
    assert scatter["config"]["yAxis"] == f"summary:{PERPLEXITY}"
    colours = against_heads["customRunColors"]
    by_variant = {label: {colours[run.name] for run in comparison.of(label)} for label in comparison.labels()}
    assert all(len(own) == 1 for own in by_variant.values())
    assert len(set.union(*by_variant.values())) == len(by_variant)


def test_every_metric_of_the_panels_is_logged(dense_run: RunFolder, runs: Runs) -> None:
    """By a run's own metrics.csv and result.json, whose names are those in W&B."""
    folder = runs.run(runs.pruning("pruned", dense_run.last))
    logged = {name for row in read_metrics(folder.metrics) for name in row}
    assert {STEP, *OVER_STEPS, OPEN_HEADS.format(0), OPEN_HEADS.format(1)} <= logged
    result: dict[str, Any] = dict(flat(folder.finished() or {}, "/"))
    assert {HEADS_KEPT, PERPLEXITY} <= set(result)


def test_a_report_of_folders_is_refused(sweep: Path) -> None:
    with pytest.raises(InputError, match="report=true shows runs of W&B: name their project by wandb="):
        compare_runs(CompareSettings(runs=[str(sweep)], report=True))


def test_without_the_extra_one_line_says_how_to_install(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read; and only where a report is asked for."""
    monkeypatch.delitem(sys.modules, "wandb_workspaces.reports.v2", raising=False)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    importlib.reload(wandb_report)
    with pytest.raises(InputError, match=r'^report=true needs: pip install "allattn\[reports\]"$'):
        compare_runs(CompareSettings(wandb=PATH, report=True))
    assert stand_in.operations == []


@pytest.mark.usefixtures("_library")
def test_a_project_that_is_not_there_is_one_line(stand_in: StandIn, sweep: Path) -> None:
    with pytest.raises(InputError) as error:
        save_report(side_by_side(*read_local_runs([sweep])), "someone/elsewhere", None)
    assert str(error.value).startswith("wandb=someone/elsewhere: W&B did not take the report (Run set ")
    assert "\n" not in str(error.value)
    assert stand_in.reports == []
