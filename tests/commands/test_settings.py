"""Hydra compositions of the two commands, and what is refused before anything is trained."""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from support.command_fixtures import CommandLine, changed_settings

from allattn.commands.mistakes import setting_kinds
from allattn.data.config import Source
from allattn.errors import InputError
from allattn.settings import (
    PretrainSettings,
    PruneSettings,
    plain,
    pretrain_settings,
    prune_settings,
)
from allattn.training.config import OptimizerName, ScheduleConfig, Shape, in_steps

CONF = Path(__file__).resolve().parents[2] / "conf"
EXPERIMENTS = {  # by command
    command: sorted(path.stem for path in (CONF / "experiment" / command).glob("*.yaml"))
    for command in ("train", "prune")
}
Compose = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("own_folder")


def train(*overrides: str) -> PretrainSettings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pretrain_settings(compose("train", list(overrides)))


def prune(*overrides: str) -> PruneSettings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return prune_settings(compose("prune", ["checkpoint=last.ckpt", *overrides]))


def test_there_are_experiments() -> None:
    assert {"demo", "paper", "small"} <= set(EXPERIMENTS["train"]) <= set(EXPERIMENTS["prune"])


@pytest.mark.parametrize(
    ("stage", "experiment"),
    [(stage, name) for stage in (train, prune) for name in EXPERIMENTS[stage.__name__]],
)
def test_every_experiment_composes(stage: Compose, experiment: str) -> None:
    settings = stage(f"experiment={experiment}")
    assert isinstance(settings.optimizer.name, OptimizerName)
    assert isinstance(settings.schedule, ScheduleConfig)
    values = plain(settings)
    assert yaml.safe_load(yaml.safe_dump(values)) == values, "config.yaml holds all of it"


def test_every_choice_of_every_group_composes() -> None:
    """The n-th of each group together."""
    groups = ("optimizer", "trainer", "logger")
    choices = [sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in groups]
    for chosen in zip_longest(*choices):
        train(*(f"{group}={choice}" for group, choice in zip(groups, chosen, strict=True) if choice))


def test_every_text_composes() -> None:
    for choice in sorted(path.stem for path in (CONF / "data").glob("*.yaml")):
        more = ["data.folder=text"] if choice == "files" else []
        word = [] if "raw" in choice or choice == "checkpoint" else ["data.tokenizer=word"]
        (prune if choice == "checkpoint" else train)(f"data={choice}", *more, *word)


def test_paper_pretraining() -> None:
    settings = train()
    assert settings.data.source is Source.wikitext103
    assert settings.optimizer.name is OptimizerName.lamb
    assert settings.optimizer.learning_rate == 0.01
    assert settings.optimizer.betas == [0.9, 0.999]
    assert settings.optimizer.weight_decay == 0
    assert settings.optimizer.gradient_clip == 0.5
    schedule = settings.schedule
    assert (schedule.batch_size, schedule.segment_length, schedule.steps) == (192, 192, 56_000)
    assert (schedule.warmup_steps, schedule.shape, schedule.final_ratio) == (2_800, Shape.cosine, 0.1)
    model = settings.model
    assert (model.layers, model.width, model.heads, model.persistent_vectors) == (16, 512, 8, 2048)
    assert (model.memory_length, model.position_rows) == (192, 512)
    assert (model.cutoffs, model.div) == ([20_000, 40_000, 200_000], 4)
    dropouts = [
        getattr(model, f"{n}_dropout") for n in ("attention", "projection", "input", "output", "word")
    ]
    assert dropouts == [0.2, 0.1, 0.1, 0.1, 0.1]


def test_paper_pruning() -> None:
    settings = prune()
    assert settings.data.source is Source.checkpoint
    assert settings.optimizer.name is OptimizerName.lamb
    assert settings.optimizer.learning_rate == 1e-4
    schedule, gates = settings.schedule, settings.gates
    assert (schedule.batch_size, schedule.segment_length, schedule.steps) == (192, 192, 56_000)
    assert (schedule.warmup_steps, schedule.shape) == (0, Shape.constant)
    assert (gates.lambda_max, gates.lambda_warmup_steps, gates.freeze_step) == (0.02, 4_000, 16_000)
    assert (gates.learning_rate_ratio, gates.initial_pi) == (10, 2)
    assert gates.output_scaling
    assert not gates.scale_gradient
    assert (gates.beta, gates.gamma, gates.zeta) == (pytest.approx(1 / 3), -0.1, 1.1)


def test_overrides_win_over_the_experiment() -> None:
    settings = train("experiment=demo", "schedule.steps=7", "schedule.warmup_steps=2", "name=mine")
    assert (settings.schedule.steps, settings.schedule.warmup_steps, settings.name) == (7, 2, "mine")
    assert settings.schedule.batch_size == 8, "the experiment's other values stay"


@pytest.mark.parametrize("tokens", [36_864 * 100, 36_864 * 99 + 1])
def test_lengths_in_tokens_become_steps(tokens: int) -> None:
    settings = train(f"schedule.tokens={tokens}", "schedule.warmup_tokens=36864")
    assert (settings.schedule.steps, settings.schedule.warmup_steps) == (100, 1)
    assert settings.schedule == in_steps(settings.schedule)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("schedule.steps=0", "schedule.steps=0"),
        ("schedule.warmup_steps=99999999", "schedule.warmup_steps"),
        ("schedule.final_ratio=1.5", "schedule.final_ratio=1.5"),
        ("schedule.batch_size=0", "schedule.batch_size=0"),
        ("trainer.accumulation=5", "trainer.accumulation"),
        ("trainer.log_interval=0", "trainer.log_interval=0"),
        ("trainer.strategy=deepspeed", "trainer.strategy=deepspeed: must be one of auto, ddp, fsdp"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate=0"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas"),
        ("optimizer.gradient_clip=-1", "optimizer.gradient_clip=-1"),
        ("eval.rows=0", "eval.rows=0"),
        ("eval.interval=-1", "eval.interval=-1"),
        ("eval.memory_length=0", "eval.memory_length=0"),
        ("model.heads=7", "model.heads=7"),
        ("model.cutoffs=[40,20]", "model.cutoffs"),
        ("data.source=checkpoint", "data=checkpoint"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate=nan"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay=inf"),
    ],
)
def test_contradictory_settings_are_refused(override: str, named: str) -> None:
    with pytest.raises(InputError) as refusal:
        pretrain_settings(changed_settings("train", override))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("precision", ["16-mixed", "64-true"])
def test_precision_that_sharding_does_not_take_is_refused(precision: str) -> None:
    with pytest.raises(InputError, match=f"trainer.strategy=fsdp does not go with .*{precision}"):
        train("trainer.strategy=fsdp", f"trainer.precision={precision}")
    assert train("trainer.strategy=fsdp", "trainer.precision=bf16-mixed").trainer.strategy == "fsdp"


def test_pruning_needs_a_checkpoint(composed: CommandLine) -> None:
    done = composed("prune")
    assert done.status == 2
    assert done.seen == []
    assert "needs checkpoint=PATH" in done.err


@pytest.mark.parametrize(
    ("name", "override", "nearest"),
    [
        ("train", "+model.gate.lamda=0.5", None),
        ("prune", "+model.gate.lamda=0.5", "gates.lambda_max"),
        ("prune", "+gates.lamda_max=0.5", "gates.lambda_max"),
        ("prune", "gates.lamda_max=0.5", "gates.lambda_max"),
        ("train", "schedule.step=3", "schedule.steps"),
        ("train", "+schedule.step=3", "schedule.steps"),
        ("train", "+optimiser.learning_rate=1", "optimizer.learning_rate"),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest_name(
    composed: CommandLine, name: str, override: str, nearest: str | None
) -> None:
    arguments = [override] if name == "train" else ["checkpoint=last.ckpt", override]
    done = composed(name, *arguments)
    assert done.status == 2
    assert done.seen == [], "nothing was trained"
    assert done.err.count("\n") == 1
    unknown = override.removeprefix("+").split("=")[0]
    assert done.err.startswith(f"error: there is no setting {unknown}")
    if nearest:
        assert f"did you mean {nearest}?" in done.err


def test_comma_that_makes_a_sweep_of_numbers_is_refused(composed: CommandLine) -> None:
    done = composed("train", "-m", "experiment=demo", "model.cutoffs=20,40")
    assert done.status == 2
    assert done.seen == [], "refused before training"
    assert "model.cutoffs" in done.err


def test_sweep_over_lists_runs_with_lists(composed: CommandLine) -> None:
    done = composed("train", "-m", "experiment=demo", "model.cutoffs=[20,40],[10,30]")
    assert done.status == 0
    assert [settings.model.cutoffs for settings in done.seen] == [[20, 40], [10, 30]]
    assert len({settings.name for settings in done.seen}) == 2, "each job has its own folder"


def test_sweep_values_reach_every_job(composed: CommandLine) -> None:
    arguments = ("-m", "experiment=demo", "checkpoint=last.ckpt", "gates.lambda_max=0,0.01,0.5", "seed=1,2")
    done = composed("prune", *arguments)
    assert done.status == 0
    found = {(settings.gates.lambda_max, settings.seed): settings.name for settings in done.seen}
    assert set(found) == {(x, seed) for x in (0, 0.01, 0.5) for seed in (1, 2)}
    assert found[0.01, 2] == "demo-pruned/gates.lambda_max-0.01+seed-2"
    assert len(set(found.values())) == 6


def test_quoted_number_is_converted(composed: CommandLine) -> None:
    done = composed("prune", "checkpoint=last.ckpt", "gates.lambda_max='0.5'")
    assert done.status == 0, done.err
    assert done.seen[0].gates.lambda_max == 0.5


def test_commands_write_nothing_of_their_own(composed: CommandLine, tmp_path: Path) -> None:
    assert composed("train", "experiment=demo").status == 0
    assert list(tmp_path.iterdir()) == []


def test_names_of_all_settings() -> None:
    names = setting_kinds(PruneSettings)
    assert {"gates.lambda_max", "schedule.steps", "checkpoint", "trainer.precision"} <= names.keys()
    assert "gates" not in names
