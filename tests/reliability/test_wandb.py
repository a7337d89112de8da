"""W&B through the real client: what it records offline, read back by itself, and online runs.

Offline files are read by the client's own reader, `wandb sync`, which sends them to a stand-in server.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.processes import KILLED, KillIn, run, start
from support.wandb_recorder import API_KEY, StandIn
from support.wandb_stand_in import StandIn as Project
from support.wandb_stand_in import StandInRun as LoggedRun
from support.wandb_stand_in import serve

import allattn
from allattn.comparison.compared_run import ComparedRun
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.runs_wandb import read_wandb_runs
from allattn.training.config import LoggerConfig, WandbMode
from allattn.training.loading import load_model
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder
from allattn.training.wandb_run import WandbRun

Arguments = Callable[..., list[str]]
GATES = ("schedule.steps=12", "gates.freeze_step=8", "gates.lambda_warmup_steps=3", "gates.initial_pi=0.02")


@pytest.fixture
def server() -> Iterator[StandIn]:
    """A stand-in W&B server."""
    server = StandIn()
    yield server
    server.close()


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, tiny: Arguments) -> tuple[RunFolder, RunFolder]:
    """A pretraining and a pruning run, both recorded offline."""
    root = tmp_path_factory.mktemp("offline")
    dense, pruned = RunFolder(root / "dense"), RunFolder(root / "pruned")
    steps = ("schedule.steps=10", "schedule.warmup_steps=2", "logger=offline")
    run(root / "dense.txt", "train.py", *tiny(dense, *steps, "logger.group=study", "logger.tags=[first]"))
    arguments = tiny(pruned, *GATES, f"checkpoint={dense.last}", "logger=offline", "logger.group=study")
    run(root / "pruned.txt", "prune.py", *arguments, "ablation=no_output_scaling")
    return dense, pruned


def _sync(server: StandIn, *folders: Path) -> None:
    """Read offline records with the client's own reader, which sends them to `server`."""
    records = [str(record) for folder in folders for record in sorted(folder.glob("wandb/*run-*"))]
    _sync_records(server, folders[0], *records)


def _sync_records(server: StandIn, at: Path, *records: str) -> None:
    command = ["wandb", "sync", "--yes", "--include-online", "--include-synced", *records]
    done = subprocess.run(
        command,
        cwd=at,
        env={**os.environ, **server.environment()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def _models(server: StandIn) -> set[str]:
    """Artifacts of type model; the client puts tables up as artifacts too."""
    return {
        name for name, artifact in server.artifacts.items() if artifact["artifactType"]["name"] == "model"
    }


def _id(folder: RunFolder) -> str:
    return (folder.path / "wandb_run_id").read_text()


def _compare_rows(server: StandIn, folder: RunFolder) -> None:
    """Every cell of metrics.csv is in the history under the same name, and nothing else but W&B's own."""
    history = server.history(_id(folder))
    rows = read_metrics(folder.metrics)
    assert [row["_step"] for row in history] == [int(row["step"]) for row in rows]
    for sent, row in zip(history, rows, strict=True):
        own = {name for name in sent if not name.startswith("_")} - {"pi_table", "pi_picture"}
        assert own == set(row)
        for name, text in row.items():
            assert str(sent[name]) == text or float(sent[name]) == float(text), name


def test_offline_records_equal_metrics_config_and_result(
    server: StandIn, offline: tuple[RunFolder, RunFolder]
) -> None:
    for folder, job_type, tags in zip(
        offline, ("pretrain", "prune"), (["first"], ["no_output_scaling"]), strict=True
    ):
        _sync(server, folder.path)
        sent = server.runs[_id(folder)]
        assert (sent["displayName"], sent["groupName"], sent["jobType"]) == (
            folder.path.name,
            "study",
            job_type,
        )
        assert sorted(sent["tags"]) == tags
        _compare_rows(server, folder)
        result = json.loads(folder.result.read_text())
        config = server.config(_id(folder))
        assert config.pop("environment") == result["environment"]
        assert config.pop("corpus") == result["corpus"]
        assert config == yaml.safe_load(folder.config.read_text())
        summary = server.summary(_id(folder))
        for name, value in _flat(result):
            assert summary.get(name) == value, name  # W&B keeps no None
        assert server.files[f"/upload/{_id(folder)}/articles.json"] == folder.articles.read_bytes()
        assert server.exit_codes[_id(folder)] == 0


def test_what_was_recorded_is_read_as_from_the_folder(
    server: StandIn, offline: tuple[RunFolder, RunFolder], wandb_client: pytest.MonkeyPatch
) -> None:
    """All that a comparison knows of a run, but for where it was found and W&B's own names."""
    folder = offline[1]
    _sync(server, folder.path)
    identity = _id(folder)
    files = {"articles.json": server.files[f"/upload/{identity}/articles.json"]}
    records = (server.config(identity), server.summary(identity), server.history(identity))
    project = Project("lab", "allattn", [LoggedRun(identity, *records, name=folder.path.name, files=files)])
    with serve(project) as address:
        wandb_client.setenv("WANDB_BASE_URL", address)
        (run,), _ = read_wandb_runs("lab/allattn")
    (local,), _ = read_local_runs([folder.path])
    assert isinstance(run, ComparedRun)
    assert isinstance(local, ComparedRun)
    for logged, row in zip(run.history, local.history, strict=True):
        assert {name: value for name, value in logged.items() if not name.startswith("_")} == row
    assert replace(run, where=local.where, history=local.history) == local
    for one, other in ((run.pruned, local.pruned), (run.dense, local.dense)):
        assert one.articles is not None
        assert other.articles is not None
        assert one.articles.nats.tolist() == other.articles.nats.tolist()
    assert (run.updates, run.tokens_after_cut) == (12, local.tokens_after_cut)


def test_pi_is_a_picture_and_a_table_in_the_gate_phase(
    server: StandIn, offline: tuple[RunFolder, RunFolder]
) -> None:
    pruned = offline[1]
    _sync(server, pruned.path)
    rows = [row for row in server.history(_id(pruned)) if "pi_picture" in row]
    assert [row["_step"] for row in rows] == [8]  # where the gate phase ends; step 10 is fine-tuning
    table_file = next(path for path in server.files if "/media/table/" in path)
    table = json.loads(server.files[table_file])
    row = rows[0]
    assert table["columns"] == ["layer", "head", "pi"]
    assert len(table["data"]) == 24
    for layer, head, value in table["data"]:
        assert row[f"pi/layer_{layer:02d}/head_{head}"] == value
    picture = next(content for path, content in server.files.items() if path.endswith(".png"))
    assert picture.startswith(b"\x89PNG")


def test_online_lineage_and_no_key_on_disk(server: StandIn, tmp_path: Path, tiny: Arguments) -> None:
    environment = {**server.environment(), "WANDB_ARTIFACT_DIR": str(tmp_path / "artifacts")}
    dense, pruned = RunFolder(tmp_path / "runs" / "dense"), RunFolder(tmp_path / "runs" / "pruned")
    steps = ("schedule.steps=10", "schedule.warmup_steps=2", "logger=online")
    started = start(tmp_path / "d.txt", "train.py", *tiny(dense, *steps), environment=environment)
    assert started.wait() == 0, started.output
    assert _models(server) == {"dense:v0"}
    assert server.artifacts["dense:v0"]["state"] == "COMMITTED"
    reference = "checkpoint=wandb:lab/allattn/dense:latest"
    arguments = tiny(pruned, *GATES, reference, "logger=online")
    started = start(tmp_path / "p.txt", "prune.py", *arguments, environment=environment)
    assert started.wait() == 0, started.output
    downloaded = tmp_path / "artifacts" / "lab" / "allattn" / "dense:v0" / "last.ckpt"
    assert downloaded.read_bytes() == dense.last.read_bytes()
    assert server.used == [(_id(pruned), server.artifacts["dense:v0"]["id"])]
    model = allattn.load(downloaded.parent)  # a folder for transformers too
    own = load_model(dense.last).model
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in own.state_dict().items())
    assert "| test |" in (downloaded.parent / "README.md").read_text(encoding="utf-8")
    assert (downloaded.parent / "tokenizer_config.json").exists()
    assert sorted(path.name for path in dense.checkpoints.iterdir() if path.is_dir()) == []
    assert _models(server) == {"dense:v0", "pruned:v0"}
    _compare_rows(server, pruned)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if API_KEY.encode() in path.read_bytes()] == []


def test_a_local_path_is_traced_to_the_artifact_it_was_put_up_as(
    server: StandIn, tmp_path: Path, tiny: Arguments
) -> None:
    dense, pruned = RunFolder(tmp_path / "dense"), RunFolder(tmp_path / "pruned")
    steps = ("schedule.steps=5", "schedule.warmup_steps=2", "logger=online")
    environment = server.environment()
    started = start(tmp_path / "d.txt", "train.py", *tiny(dense, *steps), environment=environment)
    assert started.wait() == 0, started.output
    arguments = tiny(pruned, *GATES, f"checkpoint={dense.last}", "logger=online", "logger.upload=false")
    started = start(tmp_path / "p.txt", "prune.py", *arguments, environment=environment)
    assert started.wait() == 0, started.output
    assert server.used == [(_id(pruned), server.artifacts["dense:v0"]["id"])]
    assert _models(server) == {"dense:v0"}  # uploads are off


def test_an_origin_that_w_and_b_does_not_know_costs_nothing_else(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    recorded = WandbRun(LoggerConfig(), tmp_path, "run", "prune", [], {"a": 1}, offline=False)
    recorded.uses("wandb:lab/allattn/none:v0")
    recorded.log_metrics({"loss": 2.0}, 1)
    recorded.finish(failed=False)
    assert [row["loss"] for row in server.history((tmp_path / "wandb_run_id").read_text())] == [2.0]
    assert "W&B does not give lab/allattn/none:v0" in capsys.readouterr().out


@pytest.mark.parametrize("reference", ["wandb:lab/allattn", "wandb:lab/allattn/name", "wandb:a/b/c/d:v0"])
def test_a_malformed_reference_is_refused(tmp_path: Path, tiny: Arguments, reference: str) -> None:
    folder = RunFolder(tmp_path / "pruned")
    started = start(tmp_path / "p.txt", "prune.py", *tiny(folder, *GATES, f"checkpoint={reference}"))
    assert started.wait() == 2
    assert started.output.count("\n") == 1
    assert "wandb:ENTITY/PROJECT/NAME:ALIAS" in started.output


def test_an_artifact_that_is_not_there_is_one_line(server: StandIn, tmp_path: Path, tiny: Arguments) -> None:
    arguments = tiny(RunFolder(tmp_path / "pruned"), *GATES, "checkpoint=wandb:lab/allattn/none:v0")
    started = start(tmp_path / "p.txt", "prune.py", *arguments, environment=server.environment())
    assert started.wait() == 2
    last = started.output.strip().splitlines()[-1]
    assert last.startswith("error: checkpoint=wandb:lab/allattn/none:v0: W&B does not give it")
    assert not (tmp_path / "pruned").exists()


def test_a_resumed_job_continues_its_run(server: StandIn, tmp_path: Path, tiny: Arguments) -> None:
    folder = RunFolder(tmp_path / "dense")
    arguments = tiny(folder, "schedule.steps=12", "schedule.warmup_steps=2", "logger=online")
    kill = KillIn("allattn.training.language_task:LanguageTask.step_metrics", nth=9)
    started = start(
        tmp_path / "1.txt", "train.py", *arguments, kill_in=kill, environment=server.environment()
    )
    assert started.wait() == KILLED
    identity = _id(folder)
    started = start(tmp_path / "2.txt", "train.py", *arguments, environment=server.environment())
    assert started.wait() == 0, started.output
    assert set(server.runs) == {identity}
    steps = [row["_step"] for row in server.history(identity)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
    assert set(range(9, 13)) <= set(steps)


@pytest.mark.parametrize("first", ["none", "offline"])
def test_what_an_earlier_start_did_not_record_is_recorded_by_the_next(
    server: StandIn, tmp_path: Path, tiny: Arguments, offline: tuple[RunFolder, RunFolder], first: str
) -> None:
    """W&B was off, or a kill cut its record off before its first block was on disk."""
    folder = RunFolder(tmp_path / "pruned")
    arguments = tiny(folder, *GATES, f"checkpoint={offline[0].last}")
    kill = KillIn("allattn.training.language_task:LanguageTask.step_metrics", nth=11)
    started = start(tmp_path / "1.txt", "prune.py", *arguments, f"logger={first}", kill_in=kill)
    assert started.wait() == KILLED
    output = run(tmp_path / "2.txt", "prune.py", *arguments, "logger=offline").output
    (record,) = re.findall(r"wandb sync --include-online (\S+)", output)
    _sync_records(server, tmp_path, record)
    _compare_rows(server, folder)
    assert len(server.history(_id(folder))) == 12
    assert "pi_picture" in server.history(_id(folder))[7]


def test_a_run_that_fails_in_w_and_b_does_not_take_the_next_jobs_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def recorded(name: str) -> WandbRun:
        (tmp_path / name).mkdir()
        return WandbRun(LoggerConfig(), tmp_path / name, name, "prune", [], {"a": name}, offline=True)

    first = recorded("first")
    first._safely(lambda: (tmp_path / "nowhere" / "picture").write_text(""))
    first.finish(failed=False)
    second = recorded("second")
    assert second.run.id == (tmp_path / "second" / "wandb_run_id").read_text()
    assert second.run.name == "second"
    third = recorded("third")  # nor where the one before was never ended
    assert third.run.id == (tmp_path / "third" / "wandb_run_id").read_text()
    third.finish(failed=False)
    assert capsys.readouterr().out.count("W&B records are on disk") == 2


def test_no_server_means_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allattn.training.wandb_run.INIT_SECONDS", 3)
    monkeypatch.delenv("WANDB_DIR", raising=False)  # another test's client has one
    environment = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": API_KEY}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recorded = WandbRun(LoggerConfig(), tmp_path, "dense", "pretrain", [], {"a": 1}, offline=False)
    recorded.log_metrics({"loss": 1.5}, 10)
    recorded.finish(failed=False)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_a_server_that_goes_away_in_mid_run_costs_nothing(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("allattn.training.wandb_run.UPLOAD_SECONDS", 2)
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    folder.last.write_bytes(b"weights")
    for file in (folder.tokenizer, folder.articles):
        file.write_text("{}")
    config = LoggerConfig(wandb=WandbMode.online)
    recorded = WandbRun(config, tmp_path, "run", "prune", ["t"], {"a": 1}, offline=False)
    recorded.log_metrics({"loss": 2.0}, 1)
    server.down = True
    recorded.log_metrics({"loss": 1.5}, 2)
    recorded.conclude({"x": 3}, folder)
    recorded.finish(failed=False)
    printed = capsys.readouterr().out
    assert sum(line.startswith("W&B records are on disk") for line in printed.splitlines()) == 1
    server.down = False
    _sync(server, tmp_path)
    assert [row["loss"] for row in server.history((tmp_path / "wandb_run_id").read_text())] == [2.0, 1.5]


def test_jobs_of_a_multirun_are_runs_of_their_own(
    server: StandIn, offline: tuple[RunFolder, RunFolder], tmp_path: Path, tiny: Arguments
) -> None:
    """Three lambdas, the second made to fail in training: three ids, one group, the second marked failed.

    An id that was exported, even a sweep's, is that of one run and so of none of these.
    """
    arguments = tiny(RunFolder(tmp_path / "sweep"), *GATES, f"checkpoint={offline[0].last}", "logger=offline")
    lambdas = "gates.lambda_max=0.01,1e39,0.02"
    exported = {"WANDB_RUN_ID": "one", "WANDB_SWEEP_ID": "sweep"}
    started = start(tmp_path / "m.txt", "prune.py", "-m", *arguments, lambdas, environment=exported)
    assert started.wait() == 2
    names = ("gates.lambda_max-0.01", "gates.lambda_max-1e+39", "gates.lambda_max-0.02")
    folders = [RunFolder(tmp_path / "sweep" / name) for name in names]
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == set(names)
    assert [folder.result.exists() for folder in folders] == [True, False, True]
    for folder in folders:
        _sync(server, folder.path)
    assert len(server.runs) == 3
    assert {sent["groupName"] for sent in server.runs.values()} == {"sweep"}
    assert [server.exit_codes[_id(folder)] for folder in folders] == [0, 1, 0]
    assert [server.config(_id(folder))["gates"]["lambda_max"] for folder in folders] == [0.01, 1e39, 0.02]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
