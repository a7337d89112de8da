"""Every setting of both commands where a run goes on: it takes effect, changes no number, or is refused."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allattn.commands.mistakes import setting_kinds
from allattn.errors import InputError
from allattn.pruning.config import Penalty, Selection, Trained
from allattn.settings import PretrainSettings, PruneSettings, Resume, RunSettings, plain
from allattn.training import resumable_settings as lists
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import Shape, in_steps
from allattn.training.flat_names import among
from allattn.training.run_folder import RunFolder, open_run_folder

LISTS = {
    name: getattr(lists, name)
    for name in ("FREE", "BY_CONTENT", "WITHOUT_EFFECT", "TAKES_EFFECT", "WITH_GATES", "FIXED")
}
SETTINGS = sorted({*setting_kinds(PretrainSettings), *setting_kinds(PruneSettings)})
# Another value for each setting that takes effect; the run has them as in `pruning`.
OTHER: dict[str, Any] = {
    "optimizer.learning_rate": 0.002,
    "optimizer.betas": [0.8, 0.99],
    "optimizer.eps": 1e-3,
    "optimizer.weight_decay": 0.3,
    "optimizer.gradient_clip": 0.01,
    "schedule.batch_size": 2,
    "schedule.segment_length": 5,
    "schedule.steps": 12,
    "schedule.warmup_steps": 3,
    "schedule.shape": Shape.constant,
    "schedule.final_ratio": 0.5,
    "schedule.tokens": 12 * 24,
    "schedule.warmup_tokens": 3 * 24,
    "eval.interval": 4,
    "trainer.precision": "bf16-mixed",
    "gates.lambda_max": 0.5,
    "gates.lambda_warmup_steps": 4,
    "gates.freeze_step": 7,
    "gates.output_scaling": False,
    "gates.scale_gradient": True,
    "gates.beta": 0.5,
    "gates.gamma": -0.3,
    "gates.zeta": 1.4,
    "gates.threshold": 0.01,
    "gates.penalty": Penalty.hard,
    "gates.learning_rate_ratio": 5.0,
    "gates.target_sparsity": None,
    "gates.target_gain": 1.0,
    "gates.train": Trained.gates,
    "distill.weight": 0.0,
    "distill.temperature": 3.0,
    "distill.gates": False,
}
STOP = 3  # then one more step with the setting changed


def with_value(settings: Any, name: str, value: Any) -> Any:
    """Settings, in place, with one of them changed."""
    *groups, last = name.split(".")
    target = settings
    for group in groups:
        target = getattr(target, group)
    assert getattr(target, last) != value
    setattr(target, last, value)
    return settings


def pruning(runs: Any, dense_run: RunFolder, **changes: Any) -> PruneSettings:
    """A run that warms up and decays, with gates under a target until step 6 of 10, and a teacher."""
    settings = runs.pruning(
        "run",
        dense_run.last,
        schedule__shape=Shape.cosine,
        schedule__warmup_steps=2,
        gates__freeze_step=6,
        gates__lambda_warmup_steps=5,
        gates__target_sparsity=0.5,
        gates__initial_pi=0.5,
        distill__weight=0.5,
        distill__gates=True,
        eval__interval=0,
        **changes,
    )
    assert isinstance(settings, PruneSettings)
    return settings


def test_every_setting_is_in_one_list() -> None:
    for setting in SETTINGS:
        assert len([name for name, held in LISTS.items() if among(setting, held)]) == 1, setting
    for name, held in LISTS.items():
        for one in held:
            assert any(among(setting, (one,)) for setting in SETTINGS), (
                f"{name} lists {one}, which is no setting"
            )
    assert OTHER.keys() == {*lists.TAKES_EFFECT, *lists.WITH_GATES}


@pytest.fixture(scope="module")
def stopped(
    runs_below: Callable[[Path], Any],
    dense_run: RunFolder,
    stop: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunFolder:
    """A pruning run that was stopped in the gate phase; not to be written to."""
    runs = runs_below(tmp_path_factory.mktemp("stopped"))
    settings = pruning(runs, dense_run)
    stop.by_signal(lambda: runs.run(settings), STOP)
    folder = runs.at(settings)
    assert isinstance(folder, RunFolder)
    return folder


Numbers = Callable[[PruneSettings], tuple[dict[str, torch.Tensor], dict[str, str]]]


@pytest.fixture
def after_a_step(runs: Any, stop: Any, rows: Any, stopped: RunFolder) -> Numbers:
    """Weights, gates and row of metrics after one more step of the stopped run."""

    def numbers(settings: PruneSettings) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        folder = runs.at(settings)
        shutil.copytree(stopped.path, folder.path)
        stop.by_signal(lambda: runs.run(settings), STOP + 1)
        state = read_checkpoint(folder.last)["state_dict"]
        row = rows(folder)[-1]
        shutil.rmtree(folder.path)
        return state, row

    return numbers


@pytest.fixture(scope="module")
def unchanged() -> dict[str, Any]:
    """What a step gives without a change, once it is computed."""
    return {}


@pytest.mark.parametrize("name", OTHER)
def test_the_next_step_follows_it(
    runs: Any, dense_run: RunFolder, after_a_step: Numbers, unchanged: dict[str, Any], name: str
) -> None:
    if not unchanged:
        unchanged["state"], unchanged["row"] = after_a_step(pruning(runs, dense_run))
    settings = with_value(pruning(runs, dense_run, resume=Resume.changed), name, OTHER[name])
    settings.schedule = in_steps(settings.schedule)
    state, row = after_a_step(settings)
    if name == "eval.interval":
        assert "valid_loss" in row.keys() - unchanged["row"].keys()
        return
    same = [key for key in state if torch.equal(state[key], unchanged["state"][key])]
    assert len(same) < len(state), "weights, pi and the controller of lambda are as without the change"


def test_the_numbers_stay(runs: Any, stop: Any, rows: Any) -> None:
    """Settings for speed and memory; processes and strategies are tested with real processes."""
    dropout = {
        f"model__{name}_dropout": 0.0 for name in ("attention", "projection", "input", "output", "word")
    }
    whole = rows(runs.run(runs.pretraining("whole", **dropout)))
    stop.by_signal(lambda: runs.run(runs.pretraining("run", **dropout)), STOP)
    other = {
        "eval__rows": 2,
        "eval__segment_length": 5,
        "trainer__accelerator": "auto" if not torch.cuda.is_available() else "cpu",
        "trainer__accumulation": 2,
        "trainer__log_interval": 2,
        "trainer__checkpoint_interval": 2,
    }
    found = rows(runs.run(runs.pretraining("run", **dropout, **other, resume=Resume.changed)))
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "6", "8", "10"]
    expected = {row["step"]: row for row in whole}
    for row in found:
        for column in row.keys() & {"loss", "gradient_norm", "valid_loss"}:
            assert float(row[column]) == pytest.approx(float(expected[row["step"]][column]), rel=1e-5)


@pytest.fixture(params=["pretrain", "prune"])
def saved(request: pytest.FixtureRequest, runs: Any, dense_run: RunFolder) -> RunSettings:
    """Settings of a run whose folder says that something is saved."""
    settings = runs.pretraining("run") if request.param == "pretrain" else pruning(runs, dense_run)
    with open_run_folder(runs.at(settings).path, plain(settings), False) as folder:
        folder.last.touch()
    assert isinstance(settings, RunSettings)
    return settings


def changed_leaves(settings: RunSettings, held: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting of a list that these settings have: its name, the configuration with another value."""
    for name in (name for name in setting_kinds(type(settings)) if among(name, held)):
        config = plain(settings)
        *groups, last = name.split(".")
        target = config
        for group in groups:
            target = target[group]
        target[last] = "another"
        yield name, config


def test_fixed_settings_are_refused_by_name(runs: Any, saved: RunSettings) -> None:
    names = []
    for name, config in changed_leaves(saved, lists.FIXED):
        names.append(name)
        with (
            pytest.raises(InputError, match=rf"\b{name} cannot change where a run goes on"),
            open_run_folder(runs.at(saved).path, config, True),
        ):
            pass
    assert {"seed", "optimizer.name", "eval.mode"} <= set(names)


def test_the_others_need_to_be_asked_for_unless_they_are_free(runs: Any, saved: RunSettings) -> None:
    path = runs.at(saved).path
    for _, config in changed_leaves(saved, (*lists.FREE, *lists.BY_CONTENT)):
        with open_run_folder(path, config, False):
            pass
    for name, config in changed_leaves(
        saved, (*lists.WITHOUT_EFFECT, *lists.TAKES_EFFECT, *lists.WITH_GATES)
    ):
        with open_run_folder(path, config, True):
            pass
        with (
            pytest.raises(InputError, match=rf"{name}: .* -> another.*resume=changed"),
            open_run_folder(path, config, False),
        ):
            pass


def test_another_selection_is_refused_in_one_line(
    runs: Any, dense_run: RunFolder, stopped: RunFolder
) -> None:
    shutil.copytree(stopped.path, runs.at(pruning(runs, dense_run)).path)
    settings = pruning(runs, dense_run, resume=Resume.changed, gates__selection=Selection.random)
    with pytest.raises(InputError, match=r"gates\.selection: l0 -> random"):
        runs.run(settings)


@pytest.mark.parametrize("step", [6, 7], ids=["at the freeze", "after it"])
def test_settings_of_gates_are_refused_once_no_step_has_gates(
    runs: Any, stop: Any, dense_run: RunFolder, step: int
) -> None:
    settings = pruning(runs, dense_run)
    stop.by_signal(lambda: runs.run(settings), step)
    before = runs.at(settings).config.read_bytes()
    for name in lists.WITH_GATES:
        if name == "gates.freeze_step" and step == 6:
            continue  # a later freeze means more steps with gates
        settings = with_value(pruning(runs, dense_run, resume=Resume.changed), name, OTHER[name])
        with pytest.raises(
            InputError, match=rf"{name}: .* after {step} steps there is no step with gates left"
        ):
            runs.run(settings)
    assert runs.at(settings).config.read_bytes() == before


def test_steps_that_are_done_stay_done(runs: Any, stop: Any) -> None:
    stop.by_signal(lambda: runs.run(runs.pretraining("run")), 6)
    with pytest.raises(
        InputError, match=r"has done 6 steps, so it cannot end after 5: raise schedule\.steps"
    ):
        runs.run(runs.pretraining("run", schedule__steps=5, resume=Resume.changed))
