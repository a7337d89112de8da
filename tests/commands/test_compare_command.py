"""allattn compare as a person runs it."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_fixtures import CommandLine, Ended
from support.made_up import OFF, config, history, result, write_run, write_study
from support.offline_file import items, read_records

from allattn.commands.compare import CompareSettings, compare_runs, with_flags_as_settings
from allattn.comparison.tables import text_tables
from allattn.errors import InputError
from allattn.training.config import WandbMode

FILES = {"table.md", "table.tex", "table.csv", "equal_size.csv", "runs.csv", "report.html"} | {
    f"{name}.{ending}" for name in ("curves", "perplexity", "heads", "training") for ending in ("png", "svg")
}


@pytest.fixture
def start(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`allattn compare` in a folder."""

    def run(folder: Path, *arguments: str) -> Ended:
        monkeypatch.chdir(folder)
        return command_line("compare", *arguments)

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full method and one ablation with two seeds; a failed run beside them."""
    folder = write_study(
        tmp_path_factory.mktemp("few") / "runs",
        {"full": {1: 120.0, 2: 121.0}, "scaling": {1: 122.0, 2: 124.0}},
    )
    failed = write_run(folder / "broken", config("broken", 3), None, history())
    (failed / "failure.txt").write_text("loss is nan\n")
    return folder


def test_a_plain_start_reads_runs_and_writes_comparison(runs: Path, start: Callable[..., Ended]) -> None:
    done = start(runs.parent)
    assert done.status == 0, done.err
    assert {path.name for path in (runs.parent / "comparison").iterdir()} == FILES
    assert "without output scaling" in done.out
    assert "+2.50 [-3.85, +8.85], n = 2" in done.out, (
        "2 and 3: mean 2.5, half width 12.706 * 0.7071 / sqrt(2)"
    )
    assert done.err.startswith("left out: runs/broken: failed: loss is nan\n")


def test_wandb_flags_are_read_before_anything_else(
    tmp_path: Path, start: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a login there is one line and exit status 2."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    done = start(tmp_path, "--wandb", "a/b", "--group=g")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: no W&B login: run `wandb login`")
    done = start(tmp_path, "--group")
    assert (done.status, done.err) == (2, "error: --group needs a value: --group GROUP\n")


@pytest.mark.parametrize("flag", ["--wandb", "--group"])
@pytest.mark.parametrize(
    "value", ["me/study", "a, b", "it's {1}=[x]", 'say "hi"', "a\\b", "a\\'b", "ends\\", "1", "~"]
)
def test_flags_reach_the_settings_as_they_are(composed: CommandLine, flag: str, value: str) -> None:
    for arguments in ([flag, value], [f"{flag}={value}"]):
        (made,) = composed("compare", "folder=out", *arguments, "upload=true").seen
        assert getattr(made, flag.removeprefix("--")) == value
        assert (made.folder, made.upload) == ("out", True)


@pytest.mark.parametrize("arguments", [["--wandb"], ["--group", "--wandb", "a/b"]])
def test_a_flag_without_a_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InputError, match="needs a value"):
        with_flags_as_settings(arguments)


def settings(tmp_path: Path, *runs: Path, **changes: Any) -> CompareSettings:
    return CompareSettings(runs=list(map(str, runs)), folder=str(tmp_path / "out"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "nobody"}, "no finished pruning run of group nobody in "),
        ({"wandb": "a/b"}, r"give runs=\[FOLDER,...\] or wandb=ENTITY/PROJECT, not both"),
        ({"vary": ["optimiser"]}, "vary=optimiser: no run has this setting; did you mean optimizer.name"),
        ({"upload": True, "logger": WandbMode.none}, "upload=true with logger=none"),
    ],
)
def test_what_cannot_be_done_is_refused(
    changes: dict[str, Any], message: str, runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        compare_runs(settings(tmp_path, runs, **changes))


def test_an_output_folder_that_is_a_file_is_named(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out: cannot be written"):
        compare_runs(settings(tmp_path, runs))


def test_two_runs_of_one_variant_and_seed_are_refused_by_name(runs: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", config("again", 2), result(119), history())
    with pytest.raises(InputError, match=rf"{again} and {runs}/full-2 are both full method with seed 2"):
        compare_runs(settings(tmp_path, runs, again))


def test_unfinished_runs_are_in_the_page_but_in_no_mean(runs: Path, tmp_path: Path) -> None:
    comparison = compare_runs(settings(tmp_path, runs))
    assert comparison.rows[1].seeds == [1, 2]
    assert comparison.rows[1].test.mean == 120.5
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{runs}/broken: failed: loss is nan" in page


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_characters(
    encoding: str, tmp_path: Path, start: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replaced there; the files have them, in UTF-8."""
    names = {"data.tokenizer": "Слова ± é"}
    write_run(tmp_path / "runs" / "a", config("a"), result(120), history())
    write_run(tmp_path / "runs" / "b", config("b", **names), result(121), history())
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding))
    done = start(tmp_path, "vary=[data.tokenizer]")
    sys.stdout.flush()
    assert done.status == 0, done.err
    assert "tokenizer ???" in terminal.getvalue().decode(encoding)
    for name in ("table.md", "table.tex", "table.csv", "runs.csv", "report.html"):
        assert names["data.tokenizer"][:3] in (tmp_path / "comparison" / name).read_text("utf-8")


def test_files_are_written_before_anything_is_printed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called without the command's own replacement of characters, printing fails; the files are there."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(UnicodeEncodeError):
        compare_runs(settings(tmp_path, runs))
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


def test_names_in_the_terminal_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", config("[red]a[/red]"), result(120), history())
    odd = config("[/nothing]", 1, **OFF["init"], **{"optimizer.name": "[bold]x[/bold]"})
    write_run(tmp_path / "b", odd, result(121), history())
    compare_runs(settings(tmp_path, tmp_path, vary=["optimizer.name"]))
    assert "without positive initialization, name [bold]x[/bold]" in capsys.readouterr().out


def test_upload_logs_the_same_table_and_pictures(
    runs: Path, tmp_path: Path, wandb_client: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real client, offline; its file read back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DIR")
        comparison = compare_runs(settings(tmp_path, runs, upload=True, logger=WandbMode.offline))
    import wandb

    wandb.teardown()  # the client's service writes the file out when it ends
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert f"wandb sync {path.parent}" in capsys.readouterr().out
    records = list(read_records(path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.job_type) == ("allattn", "study", "compare")
    (row,) = [
        items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"
    ]
    media = path.parent / "files"
    for made in text_tables(comparison):
        table = json.loads((media / row[f"{made.name}.path"]).read_text())
        assert (table["columns"], table["data"]) == (list(made.columns), made.rows)
    for name in ("curves", "perplexity", "heads", "training"):
        logged = (media / row[f"pictures/{name}.path"]).read_bytes()
        assert logged == (tmp_path / "out" / f"{name}.png").read_bytes()
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert summary["test_perplexity/full method"] == 120.5
    assert summary["left_out"] == [f"{runs}/broken: failed: loss is nan"]


def test_upload_of_runs_of_two_projects_is_refused(runs: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "x", config("x", 9, **{"logger.project": "other"}), result(119), history())
    with pytest.raises(InputError, match="upload=true: the runs are not of one W&B project"):
        compare_runs(settings(tmp_path, runs, other, upload=True, logger=WandbMode.offline))
