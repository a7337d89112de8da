import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from allattn.errors import InputError, Interrupted
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import open_run_folder

CONFIG: dict[str, Any] = {
    "seed": 1,
    "resume": "auto",
    "runs_folder": "runs",
    "schedule": {"steps": 10, "batch_size": 4},
    "logger": {"wandb": "none"},
    "trainer": {"progress": True, "precision": "32-true"},
    "data": {"cache_folder": "~", "source": "pydoc"},
}
HOLD = """
import sys
from pathlib import Path
from allattn.training.run_folder import open_run_folder
with open_run_folder(Path(sys.argv[1]), {}, False):
    print("held", flush=True)
    sys.stdin.read()
"""


def changed(**values: Any) -> dict[str, Any]:
    """CONFIG with some values changed; groups are merged."""
    merged = {
        name: {**CONFIG.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {**CONFIG, **merged}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run with CONFIG that has saved something."""
    with open_run_folder(tmp_path / "run", CONFIG, False) as folder:
        folder.last.touch()
        assert yaml.safe_load(folder.config.read_text()) == CONFIG
    return tmp_path / "run"


def test_a_setting_that_the_saved_run_did_not_know_was_the_default(path: Path) -> None:
    """A run of an earlier version goes on; a new setting that is not its default is a difference."""
    defaults = changed(model={"feed_forward": 0})
    with open_run_folder(path, defaults, False, defaults):
        pass
    other = changed(model={"feed_forward": 8})
    with (
        pytest.raises(InputError, match="feed_forward: 0 -> 8"),
        open_run_folder(path, other, False, defaults),
    ):
        pass


def test_other_settings_are_refused_with_their_keys(path: Path) -> None:
    other = changed(optimizer={"eps": 1e-8}, schedule={"steps": 20})
    with pytest.raises(InputError) as refusal, open_run_folder(path, other, False):
        pass
    message = str(refusal.value)
    for difference in ("optimizer.eps: absent -> 1e-08", "schedule.steps: 10 -> 20"):
        assert difference in message
    assert "batch_size" not in message
    assert "resume=changed" in message
    assert "\n" not in message
    assert yaml.safe_load((path / "config.yaml").read_text()) == CONFIG, "the refused start changed nothing"


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_of_the_other_stage_is_named_as_such(path: Path, asked: bool) -> None:
    """Not by all the settings in which the stages differ."""
    pruning = changed(gates={"lambda_max": 0.02}, checkpoint="last.ckpt")
    with (
        pytest.raises(
            InputError, match=r"run: holds a pretraining run, and this is a pruning run; give it an"
        ),
        open_run_folder(path, pruning, asked),
    ):
        pass
    with open_run_folder(path.with_name("pruned"), pruning, False) as folder:
        folder.last.touch()
    with (
        pytest.raises(InputError, match="holds a pruning run, and this is a pretraining run"),
        open_run_folder(path.with_name("pruned"), CONFIG, asked),
    ):
        pass


def test_changed_settings_are_accepted_when_asked_for(path: Path) -> None:
    other = changed(schedule={"steps": 20}, resume="changed")
    with open_run_folder(path, other, True) as folder:
        assert folder.changed == {"schedule.steps": "10 -> 20"}
        assert yaml.safe_load(folder.config.read_text()) == CONFIG, "what is saved may still refuse them"
        folder.write_config(other)
    with open_run_folder(path, changed(schedule={"steps": 20}), False):
        pass


def test_some_settings_never_change_under_a_saved_state(path: Path) -> None:
    other = changed(seed=2, model={"layers": 3}, schedule={"steps": 20})
    with pytest.raises(InputError) as refusal, open_run_folder(path, other, True):
        pass
    assert "model.layers, seed cannot change" in str(refusal.value)
    assert "resume=changed" not in str(refusal.value), "it would not help"


def test_a_start_that_saved_nothing_binds_nothing(path: Path) -> None:
    """A first start that failed on a mistyped folder does not take the run's name."""
    (path / "checkpoints/last.ckpt").unlink()
    with open_run_folder(path, changed(data={"source": "files"}), False) as folder:
        assert yaml.safe_load(folder.config.read_text())["data"]["source"] == "files"


def test_settings_without_effect_may_differ(path: Path) -> None:
    other = changed(
        resume="changed",
        runs_folder="elsewhere",
        logger={"wandb": "offline"},
        trainer={"progress": False},
        data={"cache_folder": "/tmp"},
    )
    with open_run_folder(path, other, False):
        pass


def test_settings_beside_them_may_not(path: Path) -> None:
    with (
        pytest.raises(InputError, match="holds a run with other settings"),
        open_run_folder(path, changed(trainer={"precision": "bf16-mixed"}), False),
    ):
        pass


def test_second_process_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2], **pipes) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(InputError, match="another run is writing to this folder"),
            open_run_folder(tmp_path / "run", {}, False),
        ):
            pass
        process.stdin.close()
        assert process.wait(30) == 0
    with open_run_folder(tmp_path / "run", {}, False):
        pass


def test_folder_is_free_again_after_an_error(path: Path) -> None:
    with pytest.raises(RuntimeError), open_run_folder(path, CONFIG, False):
        raise RuntimeError
    with open_run_folder(path, CONFIG, False):
        pass


def test_a_failure_is_noted_until_the_next_start(path: Path) -> None:
    """Where `allattn compare` looks for it; a stop by a signal is no failure."""
    failure = path / "failure.txt"
    with pytest.raises(InputError), open_run_folder(path, CONFIG, False):
        raise InputError("the loss is not finite at step 4")
    assert failure.read_text() == "the loss is not finite at step 4\n"
    with open_run_folder(path, CONFIG, False):
        assert not failure.exists()
    with pytest.raises(Interrupted), open_run_folder(path, CONFIG, False):
        raise Interrupted(15, "stopped")
    assert not failure.exists()


def test_a_refused_start_of_a_finished_run_is_no_failure_of_it(path: Path) -> None:
    (path / "result.json").write_text("{}")
    with pytest.raises(InputError), open_run_folder(path, CONFIG, False):
        raise InputError("belongs to another dense checkpoint")
    assert not (path / "failure.txt").exists()


def test_results_without_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InputError, match=r"no config\.yaml"), open_run_folder(tmp_path, CONFIG, True):
        pass


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot be written"),
        open_run_folder(tmp_path / "file" / "run", CONFIG, False),
    ):
        pass


def test_finished_run_is_not_run_again(
    runs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = runs.pretraining("once", schedule__steps=2, schedule__warmup_steps=0)
    folder = runs.run(settings)
    result, rows = folder.result.read_bytes(), read_metrics(folder.metrics)
    monkeypatch.setattr(
        import_module("allattn.stages.pretrain"), "prepare", lambda *args: pytest.fail("a second run began")
    )
    runs.run(settings)
    assert "is finished: test perplexity" in capsys.readouterr().out
    assert folder.result.read_bytes() == result
    assert read_metrics(folder.metrics) == rows


def test_settings_of_a_finished_run_stay(runs: Any) -> None:
    from allattn.settings import Resume

    settings = runs.pretraining("kept", schedule__steps=2, schedule__warmup_steps=0)
    folder = runs.run(settings)
    before = folder.config.read_text()
    with pytest.raises(InputError, match="other settings"):
        runs.run(runs.pretraining("kept", schedule__steps=2, seed=5, resume=Resume.changed))
    assert folder.config.read_text() == before, "result.json belongs to the settings it was made with"


@pytest.mark.parametrize("text", ["", "seed: [", "3"])
def test_damaged_settings_are_refused(path: Path, text: str) -> None:
    (path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"), open_run_folder(path, CONFIG, False):
        pass
