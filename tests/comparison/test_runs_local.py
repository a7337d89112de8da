"""Reading runs from folders: what takes part, what is named instead, and why."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.made_up import config, dense_run, history, result, write_run

from allattn.comparison.compared_run import ComparedRun, DenseRun
from allattn.comparison.runs_local import read_local_runs
from allattn.errors import InputError


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with one whole run, "good"."""
    write_run(tmp_path / "good", config("good"), result(120), history())
    return tmp_path


def test_everything_of_a_run_is_read(good: Path) -> None:
    (run,), left_out = read_local_runs([good])
    assert left_out == []
    assert (run.name, run.where, run.seed) == ("good", str(good / "good"), 1)
    assert run.pruned.perplexity == 120
    assert run.settings["gates.lambda_max"] == 0.02
    assert run.settings["environment.git_revision"] == "abc"
    assert [row["step"] for row in run.history] == list(range(20, 401, 20))
    assert "phase" not in run.history[0]


@pytest.mark.parametrize(
    ("failure", "why"),
    [(None, "unfinished"), ("loss is nan\nat step 3\n", "failed: loss is nan"), ("", "failed")],
)
def test_unfinished_and_failed_runs_are_named(good: Path, failure: str | None, why: str) -> None:
    folder = write_run(good / "other", config("other", 2), None, history())
    if failure is not None:
        (folder / "failure.txt").write_text(failure)
    runs, left_out = read_local_runs([good])
    assert [run.name for run in runs] == ["good"]
    assert [(run.where, run.why) for run in left_out] == [(str(folder), why)]


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x81" * 50)


def _empty(path: Path) -> None:
    path.write_text("")


def _no_number(path: Path) -> None:
    path.write_text("step,valid_perplexity\n300,12x\n")


def _without(old: str, new: str = "") -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text().replace(old, new)) and None


def _setting(group: str, name: str, value: object) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        settings = yaml.safe_load(path.read_text())
        settings.setdefault(group, {})[name] = value
        path.write_text(yaml.safe_dump(settings))

    return harm


@pytest.mark.parametrize(
    ("file", "harm", "why"),
    [
        ("result.json", _cut_off, "result.json cannot be read"),
        ("result.json", _binary, "result.json cannot be read"),
        ("result.json", _empty, "result.json cannot be read"),
        ("result.json", lambda path: path.write_text("[1]"), "result.json cannot be read"),
        (
            "result.json",
            _without('"perplexity": 120', '"other": 1'),
            "its result lacks pruned/test/perplexity",
        ),
        ("result.json", _without('"perplexity": 120', '"perplexity": NaN'), "pruned test perplexity is nan"),
        ("result.json", _without('"heads_total": 16', '"heads_total": "x"'), "its result cannot be read"),
        (
            "result.json",
            _without('"heads_total": 16', '"heads_total": Infinity'),
            "its result cannot be read",
        ),
        ("result.json", lambda path: path.write_text("[" * 100_000), "result.json cannot be read"),
        ("metrics.csv", Path.unlink, "no metrics"),
        ("metrics.csv", _empty, "no metrics"),
        ("metrics.csv", _binary, "metrics.csv cannot be read"),
        ("metrics.csv", _no_number, "its metrics hold '12x' for valid_perplexity"),
        ("metrics.csv", _without("step,", "stop,"), "metrics.csv cannot be read"),
        ("config.yaml", _binary, "config.yaml cannot be read"),
        ("config.yaml", _empty, "config.yaml cannot be read"),
        ("config.yaml", lambda path: path.write_text("a: [1\nb: }"), "config.yaml cannot be read"),
        ("config.yaml", _without("seed: 2\n"), "its settings lack seed"),
        (
            "config.yaml",
            _setting("gates", "freeze_step", None),
            "its settings hold 'None' for",
        ),
        ("config.yaml", _setting("gates", "initial_pi", "x"), "its settings hold 'x' for gates.initial_pi"),
        (
            "config.yaml",
            _setting("schedule", "batch_size", []),
            "its settings hold '[]' for",
        ),
    ],
)
def test_damaged_records_are_named_in_one_line(
    good: Path, file: str, harm: Callable[[Path], None], why: str
) -> None:
    folder = write_run(good / "harmed", config("harmed", 2), result(120), history())
    harm(folder / file)
    runs, left_out = read_local_runs([good])
    assert [run.name for run in runs] == ["good"], "the harmed run is never averaged in"
    (found,) = left_out
    assert found.where == str(folder)
    assert found.why.startswith(why)
    assert "\n" not in found.why


def test_a_row_cut_off_by_an_interruption_is_passed_over(good: Path) -> None:
    with (good / "good" / "metrics.csv").open("a") as file:
        file.write("420,4.5")
    (run,), _ = read_local_runs([good])
    assert run.history[-1]["step"] == 400


def test_dense_runs_and_files_of_tools_are_no_pruning_runs(good: Path) -> None:
    dense = config("dense")
    del dense["gates"]
    write_run(good / "dense", dense, {"stage": "pretrain"}, history())
    write_run(good / "good" / "wandb" / "run-1" / "files", config("copy"), None, None)
    write_run(good / "good" / ".hydra", config("copy"), None, None)
    runs, left_out = read_local_runs([good])
    assert ([run.name for run in runs], left_out) == (["good"], [])


def test_dense_runs_are_read_too(good: Path) -> None:
    """Without metrics: a comparison reads none of theirs."""
    write_run(good / "dense", *dense_run(99.0, 3, family="Transformer-XL"), None)
    (run,) = [run for run in read_local_runs([good])[0] if isinstance(run, DenseRun)]
    assert (run.seed, run.updates) == (3, 1_600)
    assert (run.dense.family, run.dense.perplexity) == ("Transformer-XL", 99.0)


def test_the_articles_beside_a_result_are_read_and_damaged_ones_named(good: Path) -> None:
    kept = {"unit": "articles", "nats": [10.5, 2.0], "tokens": [3, 1]}
    path = good / "good" / "articles.json"
    path.write_text(json.dumps({"dense": {"valid": kept}, "pruned": {"test": kept}}))
    _, left_out = read_local_runs([good])
    assert [run.why for run in left_out] == ["its articles.json cannot be read"], "dense has no test"
    path.write_text(json.dumps({"pruned": {"test": kept}}))
    (run,), _ = read_local_runs([good])
    assert isinstance(run, ComparedRun)
    assert run.pruned.articles is not None
    assert (run.pruned.articles.nats.tolist(), run.dense.articles) == ([10.5, 2.0], None)


def test_a_folder_may_be_called_wandb(tmp_path: Path) -> None:
    write_run(tmp_path / "wandb" / "one", config("one"), result(120.0), history())
    runs, left_out = read_local_runs([tmp_path])
    assert ([run.name for run in runs], left_out) == (["one"], [])


def test_a_folder_given_twice_counts_once(good: Path) -> None:
    runs, _ = read_local_runs([good, good / "good"])
    assert len(runs) == 1


def test_group_chooses_the_runs_of_one_study(good: Path) -> None:
    write_run(good / "other", config("other", **{"logger.group": "later"}), result(130), history())
    assert [run.name for run in read_local_runs([good], "later")[0]] == ["other"]
    assert len(read_local_runs([good])[0]) == 2


def test_a_logger_that_is_no_group_of_settings_has_no_group(good: Path) -> None:
    write_run(good / "old", config("old", 2) | {"logger": "none"}, result(120), history())
    assert [run.name for run in read_local_runs([good])[0]] == ["good", "old"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        read_local_runs([tmp_path / "nowhere"])
