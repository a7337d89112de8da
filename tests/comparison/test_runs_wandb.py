"""Reading runs of a W&B project with the real client from a local stand-in for its API."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.logged_fixtures import PATH, as_logged
from support.made_up import config, dense_run, history, result
from support.wandb_stand_in import StandIn, StandInRun

from allattn.comparison.compared_run import DenseRun
from allattn.comparison.curves import At
from allattn.comparison.page import html_page
from allattn.comparison.pictures import draw_pictures
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.runs_wandb import PAGE, read_wandb_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import csv_tables, notes, text_tables
from allattn.comparison.text_tables import latex_tables, markdown_tables
from allattn.errors import InputError
from allattn.pictures.drawing import svg
from allattn.training.flat_names import flat


def logged(run_id: str, perplexity: float, seed: int = 1, **changes: Any) -> StandInRun:
    """A run as the stages log it: nested settings, a summary joined by slashes, history rows."""
    settings = {name: value for name, value in changes.items() if "." in name or name == "ablation"}
    about = {name: value for name, value in changes.items() if name not in settings}
    made = StandInRun(
        run_id,
        config(run_id, seed, **settings),
        dict(flat(result(perplexity), "/")),
        history(perplexity),
        name=run_id,
        group="study",
    )
    for name, value in about.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def both(stand_in: StandIn, sweep: Path) -> Callable[..., list[Comparison]]:
    """Compares the sweep as read from its folders and from W&B, which lists the runs in another order."""
    folders = sorted(sweep.iterdir())
    random.Random(2).shuffle(folders)
    stand_in.runs += [as_logged(folder) for folder in folders]
    sources = [read_local_runs([sweep]), read_wandb_runs(PATH)]

    def compared(at: At, at_sparsity: float | None) -> list[Comparison]:
        return [side_by_side(*source, at=at, at_sparsity=at_sparsity) for source in sources]

    return compared


@pytest.mark.parametrize(("at", "at_sparsity"), [(At.heads, None), (At.parameters, 0.3)])
def test_a_study_reads_as_from_its_folders(
    both: Callable[..., list[Comparison]], sweep: Path, at: At, at_sparsity: float | None
) -> None:
    """Every form, to the byte, but for where each run was found.

    At a size that runs have there is an interval over the text; between sizes, one over seeds alone.
    """
    local, logged = both(at, at_sparsity)
    for compared in (local, logged):
        assert [row.text is not None for row in compared.equal] == [False, *[at_sparsity is None] * 2]
        assert all(row.difference for row in compared.equal[1:])
    assert logged.warnings == local.warnings
    assert [run.why for run in logged.left_out] == [run.why for run in local.left_out] == ["no metrics"]
    texts = [
        {
            "table.md": markdown_tables(text_tables(compared), notes(compared)),
            "table.tex": latex_tables(text_tables(compared), notes(compared)),
            **csv_tables(compared),
            "report.html": html_page(compared, {}),
        }
        for compared in (local, logged)
    ]
    assert texts[0].keys() >= {"table.csv", "equal_size.csv", "runs.csv"}
    for name, text in texts[0].items():
        assert texts[1][name].replace(" (y-silent)", "") == text.replace(str(sweep), PATH), name


def test_a_study_is_drawn_as_from_its_folders(both: Callable[..., list[Comparison]]) -> None:
    local, logged = (draw_pictures(compared) for compared in both(At.heads, None))
    for name, figure in local.items():
        assert svg(logged[name], name) == svg(figure, name), name


def test_runs_without_their_nats_by_article_compare_with_a_note(stand_in: StandIn, sweep: Path) -> None:
    """They were finished by an earlier version, or have not been put up."""
    stand_in.runs += [as_logged(path) for path in sorted(sweep.iterdir()) if path.name[-1] == "1"]
    del stand_in.runs[0].files["articles.json"]
    stand_in.runs[1].files["articles.json"] = b""
    comparison = side_by_side(*read_wandb_runs(PATH))
    assert [run.pruned.articles is None for run in comparison.runs].count(True) == 2
    assert comparison.equal[1].difference is not None
    assert [note for note in notes(comparison) if "nats by article" in note] == [
        "nats by article were not kept of full-0.02-1, full-0.01-1: no interval over the text with them"
    ]


@pytest.mark.parametrize("exported", [0, 1, 2_000, 5_000])
def test_history_is_read_whole(stand_in: StandIn, exported: int) -> None:
    """5,000 rows; metrics on different rows; the best at row 3,333, the last elsewhere; always the same.

    The service has exported some of the rows, none or all to files; the client reads both kinds.
    """
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(1, 5_001):
        rows.append({"step": number, "loss": 3.0, "lambda": 0.02})
        if number % 3 == 0:
            rows[-1] = {"step": number, "valid_perplexity": 26 + rng.random()}
    rows[3_332] = {"step": 3_333, "valid_perplexity": 24.17}
    rows[4_998] = {"step": 4_999, "valid_perplexity": 25.90}
    rows[100] = {"step": 101, "pi": {"_type": "image-file"}, "valid_perplexity": float("nan")}
    stand_in.runs.append(
        logged(f"long-{exported}", 25.5, history=rows, exported=exported, **{"gates.freeze_step": 1_000})
    )

    import wandb

    client = wandb.Api().runs(PATH)[0]
    samples = [client.history(pandas=False) for _ in range(2)]
    assert [len(sample) for sample in samples] == [500, 500]
    assert samples[0] != samples[1], "the call that must not be used gives other rows each time"
    assert client.history(keys=["loss", "valid_perplexity"], pandas=False) == [], "no row has both"

    for _ in range(2):
        (run,), _ = read_wandb_runs(PATH)
        assert len(run.history) == 5_000
        row = side_by_side([run], []).rows[1]
        assert row.best is not None
        assert row.last is not None
        assert (row.best.perplexity.mean, row.best.steps) == (24.17, [3_333])
        assert (row.last.perplexity.mean, row.last.steps) == (25.90, [4_999])
        assert "24.17 @ 3,333" in text_tables(side_by_side([run], []))[0].rows[1]
        assert "25.90 @ 4,999" in text_tables(side_by_side([run], []))[0].rows[1]


def test_rows_that_a_resumed_run_logged_again_count_once(stand_in: StandIn) -> None:
    rows = [{"step": step, "valid_perplexity": 100.0 - step} for step in (300, 320, 340)]
    rows += [{"step": step, "valid_perplexity": 90.0} for step in (320, 340, 360)]
    stand_in.runs.append(logged("resumed", 95, history=rows))
    (run,), _ = read_wandb_runs(PATH)
    assert [row["valid_perplexity"] for row in run.history] == [-200.0, 90.0, 90.0, 90.0]


def test_all_pages_are_read(stand_in: StandIn) -> None:
    stand_in.runs += [logged(f"r{seed}", 120 + seed, seed) for seed in range(PAGE + 3)]
    runs, _ = read_wandb_runs(PATH)
    assert [run.seed for run in runs] == list(range(PAGE + 3))
    asked = [variables for operation, variables in stand_in.operations if operation == "Runs"]
    assert [variables["cursor"] for variables in asked] == [None, str(PAGE)]


def test_only_the_groups_pruning_runs_are_read(stand_in: StandIn) -> None:
    dense = logged("dense", 100, job_type="pretrain")
    del dense.config["gates"]
    summary = logged("comparison", 100, job_type="compare", config={"runs": ["a"]})
    stand_in.runs += [dense, summary, logged("other", 1, group="later"), logged("own", 120)]
    runs, left_out = read_wandb_runs(PATH, "study")
    assert ([run.name for run in runs], left_out) == (["own"], [])


def test_dense_runs_are_read_too(stand_in: StandIn) -> None:
    settings, record = dense_run(99.0, 3, family="Transformer-XL")
    summary = dict(flat(record, "/"))
    stand_in.runs.append(logged("dense", 1, job_type="pretrain", config=settings, summary=summary))
    (run,), left_out = read_wandb_runs(PATH, "study")
    assert isinstance(run, DenseRun)
    assert (run.seed, run.dense.family, run.dense.perplexity) == (3, "Transformer-XL", 99.0)
    assert left_out == []


def test_unfinished_runs_and_runs_without_metrics_are_named(stand_in: StandIn) -> None:
    stand_in.runs += [logged(state, 120, state=state) for state in ("failed", "crashed", "running", "killed")]
    stand_in.runs += [logged("bare", 120, summary={"loss": 3.0}), logged("silent", 120, history=[])]
    stand_in.runs += [logged("diverged", float("nan")), logged("good", 120)]
    runs, left_out = read_wandb_runs(PATH)
    assert [run.name for run in runs] == ["good"]
    assert {run.where: run.why for run in left_out} == {
        **{f"{PATH}/{state} ({state})": state for state in ("failed", "crashed", "running", "killed")},
        f"{PATH}/bare (bare)": "its result lacks corpus/vocabulary_hash",
        f"{PATH}/silent (silent)": "no metrics",
        f"{PATH}/diverged (diverged)": "pruned test perplexity is nan",
    }


def refused(path: str = PATH) -> str:
    with pytest.raises(InputError) as error:
        read_wandb_runs(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_project_is_one_line(stand_in: StandIn) -> None:
    assert refused("someone/elsewhere").startswith("wandb=someone/elsewhere: there is no such project")


def test_a_refused_key_is_one_line(stand_in: StandIn) -> None:
    stand_in.refuses_key = True
    assert refused().startswith(f"wandb={PATH}: W&B did not give the runs (")


def test_an_error_of_the_service_is_one_line(stand_in: StandIn) -> None:
    def broken(query: str, variables: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("Runs")

    answer: Callable[..., dict[str, Any]] = stand_in.answer
    stand_in.answer = (  # type: ignore[method-assign]
        lambda query, variables: (answer if "viewer" in query else broken)(query, variables)
    )
    assert "W&B did not give the runs" in refused()


def test_no_login_is_one_line(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert refused().startswith("no W&B login: run `wandb login`")
    assert stand_in.operations == []


@pytest.mark.parametrize("path", ["study", "a/b/c", "/study", "someone/", ""])
def test_a_path_without_entity_or_project_is_refused(path: str) -> None:
    assert refused(path) == f"wandb={path}: give ENTITY/PROJECT"
