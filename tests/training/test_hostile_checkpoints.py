"""Checkpoints that one should not trust, in every command: one line, status 2, nothing run or overwritten."""

import copy
import json
import os
import pickle
import re
import runpy
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import allattn
from allattn.commands.evaluate import EvaluateSettings, evaluate
from allattn.errors import InputError
from allattn.record.head_map import head_record
from allattn.settings import plain
from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["prune", "evaluate", "heads", "export", "resumed train", "resumed prune"]
Edit = Callable[[dict[str, Any]], Any]


class Payload:
    """Runs a shell command when it is unpickled without restriction."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch {marker}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def edited(edit: Edit) -> Callable[[Path, Path], None]:
    """A damage that changes the loaded checkpoint and saves it."""

    def damage(path: Path, marker: Path) -> None:
        checkpoint = torch.load(path)
        edit(checkpoint)
        torch.save(checkpoint, path)

    return damage


def weights(checkpoint: dict[str, Any], name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    checkpoint["state_dict"][name] = change(checkpoint["state_dict"][name])


def truncate(path: Path, marker: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zip_file(path: Path, marker: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(marker)))
        archive.writestr("archive/version", "3\n")


def payload_in(entry: str) -> Callable[[Path, Path], None]:
    def damage(path: Path, marker: Path) -> None:
        checkpoint = torch.load(path)
        checkpoint[entry] = Payload(marker)
        torch.save(checkpoint, path)

    return damage


# What was done to the file, and what the line must say.
DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "zero bytes": (lambda path, marker: path.write_bytes(b""), "damaged"),
    "truncated": (truncate, "damaged"),
    "text": (lambda path, marker: path.write_text("not a checkpoint\n"), "not a checkpoint"),
    "safetensors": (lambda path, marker: save_file({"w": torch.ones(2)}, path), "not a checkpoint"),
    "malicious pickle": (lambda path, marker: path.write_bytes(pickle.dumps(Payload(marker))), "damaged"),
    "malicious zip": (zip_file, "damaged"),
    "malicious entry": (payload_in("allattn"), "damaged"),
    "malicious entry beside ours": (payload_in("callbacks"), "damaged"),
    "another project's": (edited(lambda c: c.pop("allattn")), "is not a checkpoint of allattn"),
    "newer format": (
        edited(lambda c: c["allattn"].update(format_version=7)),
        "has checkpoint format 7, this version of allattn reads 1",
    ),
    "another model": (
        edited(lambda c: weights(c, "model.layers.0.query.weight", lambda w: w[:, :8])),
        "layers.0.query.weight is [16, 8], but should be [16, 16]",
    ),
    "a weight is missing": (
        edited(lambda c: c["state_dict"].pop("model.positions.table")),
        "positions.table is absent",
    ),
    "NaN in a weight": (
        edited(lambda c: weights(c, "model.layers.1.bias", lambda w: w * torch.nan)),
        "layers.1.bias holds NaN",
    ),
    "sizes of the wrong kind": (edited(lambda c: c["allattn"]["model"].update(width="16")), "model.width"),
    "unknown sizes": (edited(lambda c: c["allattn"]["model"].update(depth=3)), "unknown entries: depth"),
    "an endless feed-forward sublayer": (
        edited(lambda c: c["allattn"]["model"].update(feed_forward=2**62)),
        "do not fit the recorded sizes",
    ),
    "a million layers": (
        edited(lambda c: c["allattn"]["model"].update(layers=10**6)),
        "layer 999999 is absent",
    ),
    "another phase": (edited(lambda c: c["allattn"].update(phase="dreaming")), "phase"),
    "gates without gates": (
        edited(lambda c: c["allattn"].update(phase="gates", output_scaling=True)),
        "gates",
    ),
}
IN_EVERY_COMMAND = [
    "truncated",
    "malicious pickle",
    "malicious entry beside ours",
    "newer format",
    "NaN in a weight",
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra's state and files belong to one test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    yield
    GlobalHydra.instance().clear()


def flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings as command-line arguments."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, dict):
            arguments += flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            arguments.append(f"{prefix}{name}={text}")
    return arguments


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command as `python` would, in this process: its status and its standard error."""

    def command(script: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        status = 0
        try:
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = int(end.code or 0)
        return status, capsys.readouterr().err

    return command


@pytest.fixture
def prepared(runs: Any, dense_run: RunFolder, tmp_path: Path) -> Callable[[str], tuple[Path, list[str]]]:
    """For a command: the checkpoint it will read, free to be damaged, and its command line."""

    def prepare(command: str) -> tuple[Path, list[str]]:
        if command == "resumed train":
            own = runs.pretraining("resumed")
            shutil.copytree(dense_run.path, runs.at(own).path)
            script, checkpoint, arguments = "train.py", runs.at(own).last, flat(plain(own))
            runs.at(own).result.unlink()
            runs.at(own).config.write_text(yaml.safe_dump(plain(own)))
        elif command == "resumed prune":
            own = runs.pruning("pruned", dense_run.last)
            runs.run(own)
            runs.at(own).result.unlink()
            script, checkpoint, arguments = "prune.py", runs.at(own).last, flat(plain(own))
        else:
            shutil.copytree(dense_run.checkpoints, tmp_path / "given")
            checkpoint = tmp_path / "given" / "last.ckpt"
            if command == "prune":
                script, arguments = "prune.py", flat(plain(runs.pruning("pruned", checkpoint)))
            else:
                script, arguments = "allattn", [command, f"checkpoint={checkpoint}"]
            if command == "export":
                arguments.append(f"folder={tmp_path}/exported")
            if command == "evaluate":
                arguments.append(f"data.cache_folder={runs.data.cache_folder}")
        return checkpoint, [script, *(a for a in arguments if not a.startswith("ablation="))]

    return prepare


def files(folder: Path) -> dict[Path, bytes]:
    """What lies below a folder, locks aside."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_refused(
    damage: Callable[[Path, Path], Any], message: str, dense_run: RunFolder, tmp_path: Path
) -> None:
    path, marker = tmp_path / "last.ckpt", tmp_path / "it_ran"
    shutil.copyfile(dense_run.last, path)
    damage(path, marker)
    with pytest.raises(InputError) as refusal:
        read_checkpoint(path)
    assert str(path) in str(refusal.value)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not marker.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_from_every_command(
    command: str,
    prepared: Callable[[str], tuple[Path, list[str]]],
    call: Callable[..., tuple[int, str]],
    tmp_path: Path,
) -> None:
    checkpoint, arguments = prepared(command)
    good, marker = checkpoint.read_bytes(), tmp_path / "it_ran"
    for name in IN_EVERY_COMMAND:
        damage, message = DAMAGES[name]
        checkpoint.write_bytes(good)
        damage(checkpoint, marker)
        before = files(tmp_path)
        status, error = call(*arguments)
        assert (status, error.count("\n")) == (2, 1), f"{name}: {error}"
        assert error.startswith("error: "), name
        assert str(checkpoint) in error, name
        assert message in error, f"{name}: {error}"
        assert not marker.exists(), f"{name}: its code was run"
        after = files(tmp_path)
        changed = {p for p in after.keys() | before.keys() if after.get(p) != before.get(p)}
        assert {p.name for p in changed} <= {"config.yaml", "tokenizer.json", "failure.txt"}, name
    checkpoint.write_bytes(good)
    status, error = call(*arguments)
    assert status == 0, f"{command} works with the file as it was: {error}"


def test_unpickling_would_have_run_the_payload(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    marker = tmp_path / "it_ran"
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


def test_the_code_of_no_module_loads_without_restriction() -> None:
    """Each torch.load says weights_only=True, and no other unpickler is in use."""
    for path in [*(ROOT / "allattn").rglob("*.py"), ROOT / "train.py", ROOT / "prune.py"]:
        text = path.read_text()
        assert (
            text.count("torch.load(") == text.count("weights_only=True)") if "torch.load(" in text else True
        )
        for word in ("import pickle", "import dill", "joblib", "allow_pickle", r"eval\(", r"exec\("):
            found = re.search(rf"\b{word}", text.replace(".eval()", ""))
            assert found is None, f"{path}: {word}"


OTHER_STAGE = {
    "dense where a pruned one goes on": (
        "resumed prune",
        "is of the phase pretrain, but this command goes on",
    ),
    "pruned where a dense one goes on": (
        "resumed train",
        "is of the phase fine_tune, but this command goes on",
    ),
    "of the gate phase where a dense one is needed": ("prune", "from the middle of a pruning run"),
}


@pytest.mark.parametrize(("command", "message"), OTHER_STAGE.values(), ids=OTHER_STAGE)
def test_checkpoint_of_the_other_stage(
    command: str,
    message: str,
    prepared: Callable[[str], tuple[Path, list[str]]],
    call: Callable[..., tuple[int, str]],
    runs: Any,
    dense_run: RunFolder,
) -> None:
    pruned = runs.run(runs.pruning("other", dense_run.last))
    checkpoint, arguments = prepared(command)
    given = {"resumed prune": dense_run.last, "resumed train": pruned.last, "prune": pruned.gates}[command]
    shutil.copyfile(given, checkpoint)
    status, error = call(*arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert message in error
    assert checkpoint.read_bytes() == given.read_bytes()


def test_checkpoint_that_training_cannot_go_on_from(
    prepared: Callable[[str], tuple[Path, list[str]]], call: Callable[..., tuple[int, str]]
) -> None:
    """Whole as a model, but without the optimizer's state; and one of a model of other sizes."""
    checkpoint, arguments = prepared("resumed train")
    good = checkpoint.read_bytes()
    edited(lambda c: c.pop("optimizer_states"))(checkpoint, checkpoint)
    status, error = call(*arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert "no run can go on from it: it has no optimizer_states" in error
    checkpoint.write_bytes(good)
    edited(lambda c: c["allattn"]["model"].update(memory_length=5))(checkpoint, checkpoint)
    status, error = call(*arguments)
    assert (status, error.count("\n")) == (2, 1), error
    assert "holds another model" in error
    assert "model.memory_length: 5 -> 4" in error


def test_record_of_the_text_that_is_damaged(runs: Any, dense_run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(dense_run.checkpoints, tmp_path / "given")
    path = tmp_path / "given" / "last.ckpt"
    good = path.read_bytes()
    for change, message in {
        "unknown entries: secret": {"secret": 1},
        "no known data.source": {"source": "the internet"},
        "data.folder=7": {"folder": 7},
        "is no longer there": {"folder": "/nowhere/at/all"},
    }.items():
        path.write_bytes(good)
        edited(lambda c: c["allattn"]["data"].update(message))(path, path)  # noqa: B023
        with pytest.raises(InputError) as refusal:
            evaluate(EvaluateSettings(checkpoint=str(path)))
        assert change.replace("data.folder=7", "data.folder='7'") in str(refusal.value)


JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        10**9,
        0.5,
        float("nan"),
        "",
        "x",
        [],
        [0],
        [[0]],
        [[-1]],
        {},
        {"a": 1},
        torch.ones(2),
    ]
)


@given(junk=st.lists(st.tuples(st.integers(0, 10**6), JUNK, st.booleans()), min_size=1, max_size=2))
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_junk_is_refused_or_read(
    tmp_path: Path, gated: dict[str, Any], junk: list[tuple[int, Any, bool]]
) -> None:
    """Entries of a gate-phase checkpoint replaced or removed: InputError, or it loads; nothing else."""
    checkpoint = copy.deepcopy(gated)
    for place, value, removed in junk:
        owners = [checkpoint, checkpoint["state_dict"], checkpoint.get("allattn")]
        model = checkpoint["allattn"].get("model") if isinstance(checkpoint.get("allattn"), dict) else None
        places = [(o, key) for o in [*owners, model, model] if isinstance(o, dict) for key in o]
        owner, key = places[place % len(places)]
        if removed:
            del owner[key]
        else:
            owner[key] = value
        if not isinstance(checkpoint.get("state_dict"), dict):
            break
    path = tmp_path / "junk.ckpt"
    torch.save(checkpoint, path)
    try:
        head_record(read_checkpoint(path))
        allattn.load(path)
    except InputError as refusal:
        assert str(path) in str(refusal), str(refusal)  # noqa: PT017
        assert "\n" not in str(refusal)  # noqa: PT017


@pytest.fixture(scope="module")
def gated(
    runs_below: Callable[[Path], Any], dense_run: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """gates.ckpt of a pruning run."""
    own = runs_below(tmp_path_factory.mktemp("gated"))
    return read_checkpoint(own.run(own.pruning("pruned", dense_run.last)).gates)


def test_retrained_dense_checkpoint_is_not_the_one_that_was_pruned(
    runs: Any, stop: Any, dense_run: RunFolder, tmp_path: Path
) -> None:
    """Neither a finished nor a half-done pruning run is gone on with on other dense weights."""
    shutil.copytree(dense_run.checkpoints, tmp_path / "given")
    path = tmp_path / "given" / "last.ckpt"
    finished, half = runs.pruning("finished", path), runs.pruning("half", path)
    runs.run(finished)
    stop.by_signal(lambda: runs.run(half), 7)
    good = path.read_bytes()
    edited(lambda c: weights(c, "model.layers.1.bias", lambda w: w + 1e-6))(path, path)
    for settings_, where in ((finished, "result.json"), (half, "last.ckpt")):
        before = files(runs.at(settings_).path)
        with pytest.raises(InputError, match=rf"{where}: belongs to another dense checkpoint"):
            runs.run(settings_)
        after = files(runs.at(settings_).path)
        assert {p: c for p, c in after.items() if p.name != "failure.txt"} == before
    path.write_bytes(good)
    runs.run(half)
