"""Settings of the wrong kind, groups named in a wrong way: a line in our words, none in Hydra's."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.command_fixtures import CommandLine

from allattn.commands.choices import check_choices, groups_of
from allattn.commands.mistakes import in_words, setting_kinds
from allattn.commands.overrides import parsed
from allattn.commands.run_command import CONF
from allattn.errors import InputError
from allattn.settings import PretrainSettings, PruneSettings
from allattn.training.config import OptimizerName

CHOICES = {  # command, what is typed, what is said
    "added group": ("prune", "+ablation=x", "a choice of ablation is made already: give ablation=x"),
    "forced group": ("train", "++experiment=demo", "made already: give experiment=demo"),
    "added setting": ("train", "+schedule.steps=3", "is there already: give schedule.steps=3"),
    "group of the other command": ("train", "ablation=all_three", "there is no setting ablation"),
    "added there": ("train", "+gates=paper", "there is no setting gates"),
    "no name": ("train", "optimizer=3", "takes one choice; there are adamw, lamb, muon"),
    "several at once": (
        "train",
        "experiment=[demo,small]",
        "takes one choice; there are causal_lm, demo, paper, small",
    ),
    "no choice": ("train", "experiment=null", "takes one choice"),
    "group without files": (
        "train",
        "eval=3",
        "eval stands for several settings: give one of them, as eval.",
    ),
    "below a setting": ("train", "schedule.steps.x=3", "there is no setting schedule.steps.x; did you mean"),
    "package": ("train", "schedule@x=pretrain", "is no setting"),
    "number for nothing": ("train", "sede=3", "there is no setting sede; did you mean seed?"),
}


@pytest.mark.parametrize(("command", "typed", "said"), CHOICES.values(), ids=CHOICES)
def test_groups_and_settings_that_are_named_in_a_wrong_way(command: str, typed: str, said: str) -> None:
    kinds = setting_kinds({"train": PretrainSettings, "prune": PruneSettings}[command])
    groups = groups_of(CONF / f"{command}.yaml")
    with pytest.raises(InputError) as refusal:
        check_choices(parsed([typed], kinds), kinds, groups, CONF)
    assert said in str(refusal.value)


def test_what_hydra_takes_is_let_through() -> None:
    kinds, groups = setting_kinds(PretrainSettings), groups_of(CONF / "train.yaml")
    typed = ["++seed=3", "schedule={steps: 3}", "optimizer.betas.0=0.5", "hydra/launcher=slurm", "+mine=x"]
    swept = ["-m", "optimizer=lamb,adamw", "seed=1,2", "experiment=choice(demo,small)", "seed=range(1,4)"]
    for words in (typed, swept):
        check_choices(parsed(words, kinds), kinds, groups, CONF)


WRONG = {
    "schedule.steps=abc": "must be a whole number",
    "model.layers=1.5": "must be a whole number",
    "schedule.steps=null": "must be a whole number",
    "optimizer.learning_rate=[1]": "must be a number",
    "optimizer.name=sgd": "must be one of lamb, adamw, muon",
    "optimizer.name=[lamb]": "must be one of lamb, adamw, muon",
    "model.cutoffs=20": "must be a list, as [a,b], each a whole number",
    "optimizer.betas=[a,b]": "must be a list, as [a,b], each a number",
    "model.cutoffs={a:1}": "must be a list, as [a,b], each a whole number",
    "trainer.progress=maybe": "must be true or false",
    "schedule.tokens=x": "must be a whole number or null",
}


@pytest.mark.parametrize(("typed", "said"), WRONG.items())
def test_a_value_of_the_wrong_kind_is_told_what_the_setting_takes(
    composed: CommandLine, typed: str, said: str
) -> None:
    done = composed("train", typed)
    assert (done.status, done.seen, done.err) == (2, [], f"error: {typed}: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune", "checkpoint=last.ckpt", "~ablation"], "~ablation: no setting can be taken away"),
        (
            ["evaluate", "last.ckpt", "data=files"],
            "data stands for several settings: give one of them, as data.s",
        ),
        (["train", "seed=${nothing}"], "seed: refers to what is not there"),
        (["train", "schedule.steps=???"], "steps: has no value"),
    ],
)
def test_what_is_no_value_is_one_line(composed: CommandLine, words: list[str], said: str) -> None:
    done = composed(*words)
    assert (done.status, done.seen, done.err.count("\n")) == (2, [], 1)
    assert done.err.startswith(f"error: {said}")


def test_a_file_of_ones_own_with_a_wrong_value(composed: CommandLine, tmp_path: Path) -> None:
    for place in ("experiment", "experiment/train", "data/experiment", "model"):
        (tmp_path / "own" / place).mkdir(parents=True, exist_ok=True)
        source = CONF / place / "demo.yaml"
        (tmp_path / "own" / place / "mine.yaml").write_text(source.read_text())
    with (tmp_path / "own" / "experiment" / "mine.yaml").open("a") as file:
        file.write("optimizer:\n  learning_rate: fast\n")
    done = composed("train", f"--config-dir={tmp_path}/own", "experiment=mine")
    assert (done.status, done.seen) == (2, [])
    assert done.err == "error: experiment/mine.yaml: optimizer.learning_rate=fast: must be a number\n"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (list[str] | None, "a list, as [a,b], each text or null"),
        (OptimizerName, "one of lamb, adamw, muon"),
        (float, "a number"),
    ],
)
def test_kinds_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words


def test_every_declared_kind_has_words() -> None:
    for schema in (PretrainSettings, PruneSettings):
        assert all(map(in_words, setting_kinds(schema).values()))


# --- around a run


def test_a_current_folder_that_was_deleted_is_one_line(composed: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = composed("train", "experiment=demo")
    assert (done.status, done.seen) == (2, [])
    assert done.err == "error: the current folder has been deleted: go to another one (cd)\n"


@pytest.mark.parametrize(("fault", "status"), [(InputError("seed 2 is bad"), 2), (RuntimeError("a bug"), 1)])
def test_a_failed_job_of_a_multirun_leaves_the_others(
    command_line: CommandLine, fault: Exception, status: int
) -> None:
    """Our line, or where the program went wrong; nothing of Hydra's; the exit status says it."""

    def job(settings: Any) -> None:
        if settings.seed == 2:
            raise fault

    done = command_line("train", "-m", "experiment=demo", "seed=1,2,3", do=job)
    assert done.status == status
    assert [settings.seed for settings in done.seen] == [1, 2, 3]
    assert "HYDRA_FULL_ERROR" not in done.err
    assert "Error executing job" not in done.err
    if isinstance(fault, InputError):
        assert done.err == "error: seed 2 is bad\n"
    else:
        assert done.err.count("a bug") == 1
