"""Settings that contradict each other: one line that names both, before a model is built."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_fixtures import CommandLine, changed_settings

from allattn.commands.evaluate import EvaluateSettings, evaluate
from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.settings import pretrain_settings, prune_settings
from allattn.training import runner
from allattn.training.config import EvaluationConfig, TrainerConfig
from allattn.training.run_folder import RunFolder

CONF = Path(__file__).resolve().parents[2] / "conf"
TYPED: dict[str, Callable[[Any], Any]] = {"train": pretrain_settings, "prune": prune_settings}
pytestmark = pytest.mark.usefixtures("own_folder")
# command, overrides, what the line must name
COMPOSED: list[tuple[str, list[str], list[str]]] = [
    (
        "prune",
        ["gates.freeze_step=3999"],
        ["gates.freeze_step=3999", "gates.lambda_warmup_steps=4000"],
    ),
    ("prune", ["schedule.steps=15999"], ["gates.freeze_step=16000", "schedule.steps=15999"]),
    (
        "prune",
        ["gates.lambda_warmup_steps=60000", "gates.freeze_step=60000"],
        ["gates.freeze_step=60000", "schedule.steps=56000"],
    ),
    ("train", ["schedule.steps=2799"], ["schedule.warmup_steps=2800", "schedule.steps=2799"]),
    (
        "train",
        ["schedule.tokens=36864", "schedule.warmup_tokens=36865"],
        ["schedule.warmup_steps=2", "schedule.steps=1"],
    ),
    ("train", ["model.heads=7"], ["model.width=512", "model.heads=7"]),
    ("train", ["model.cutoffs=[40,20]"], ["model.cutoffs=[40, 20]", "increasing"]),
    ("train", ["model.cutoffs=[20,20]"], ["model.cutoffs=[20, 20]", "increasing"]),
    ("train", ["model.cutoffs=[-1]"], ["model.cutoffs=[-1]", "positive"]),
    ("train", ["model.memory_length=0"], ["model.memory_length=0"]),
    (
        "train",
        ["model.memory_length=512"],
        ["model.memory_length=512", "model.position_rows=512", "at least 513"],
    ),
    (
        "train",
        ["model.same_length=false", "schedule.segment_length=400"],
        ["model.memory_length=192", "schedule.segment_length=400", "model.position_rows=512"],
    ),
    (
        "train",
        ["model.same_length=false", "eval.segment_length=321"],
        ["eval.memory_length=192", "eval.segment_length=321", "model.position_rows=512"],
    ),
    (
        "train",
        ["model.same_length=false", "eval.mode=window", "eval.stride=1"],
        ["eval.context=512", "eval.stride=1", "model.position_rows=512"],
    ),
    ("train", ["eval.memory_length=512"], ["eval.memory_length=512", "model.position_rows=512"]),
    ("train", ["schedule.segment_length=0"], ["schedule.segment_length=0"]),
    ("train", ["schedule.segment_length=0", "schedule.tokens=100"], ["schedule.segment_length=0"]),
    ("train", ["eval.segment_length=0"], ["eval.segment_length=0"]),
    ("train", ["trainer.accumulation=5"], ["schedule.batch_size=192", "trainer.accumulation"]),
    ("train", ["trainer.devices=5"], ["schedule.batch_size=192", "trainer.devices"]),
    ("prune", ["gates.threshold=0"], ["gates.threshold=0"]),
    ("prune", ["gates.threshold=1"], ["gates.threshold=1"]),
    ("prune", ["gates.gamma=0.1"], ["gates.gamma=0.1"]),
    ("prune", ["gates.gamma=0"], ["gates.gamma=0"]),
    ("prune", ["gates.zeta=0.9"], ["gates.zeta=0.9"]),
    ("prune", ["gates.zeta=1"], ["gates.zeta=1"]),
    ("prune", ["gates.lambda_max=-0.02"], ["gates.lambda_max=-0.02"]),
    ("prune", ["gates.target_sparsity=1"], ["gates.target_sparsity=1", "[0, 1)"]),
    ("prune", ["gates.target_sparsity=-0.1"], ["gates.target_sparsity=-0.1", "[0, 1)"]),
    (
        "prune",
        ["gates.target_sparsity=0.5", "gates.lambda_max=0"],
        ["gates.target_sparsity", "gates.lambda_max"],
    ),
    ("prune", ["gates.selection=random"], ["gates.selection=random", "gates.target_sparsity"]),
    (
        "prune",
        ["gates.selection=awft_ln", "gates.target_sparsity=0.5"],
        ["gates.selection=awft_ln", "first token", "ahon_ln"],
    ),
    ("prune", ["distill.weight=1.5"], ["distill.weight=1.5"]),
    ("prune", ["distill.temperature=0"], ["distill.temperature=0"]),
    ("prune", ["gates.selection_steps=0"], ["gates.selection_steps=0"]),
    (
        "prune",
        [
            "gates.selection=random",
            "gates.target_sparsity=0.5",
            "gates.selection_steps=3",
            "schedule.warmup_steps=4",
        ],
        ["schedule.warmup_steps=4", "gates.selection_steps=3"],
    ),
    (
        "prune",
        [
            "gates.selection=iterative",
            "gates.target_sparsity=0.5",
            "gates.iterations=9",
            "gates.selection_steps=8",
        ],
        ["gates.iterations=9", "of 8"],
    ),
    ("prune", ["gates.scope=each_layer"], ["gates.scope=each_layer", "gates.selection=l0"]),
    ("train", ["data.vocabulary_size=500"], ["data.vocabulary_size=500", "data.tokenizer=word"]),
    ("train", ["data.folder=text"], ["data.folder=text", "data.source=wikitext103"]),
    *[
        ("train", [f"model.{name}_dropout={value}"], [f"model.{name}_dropout={value}", "[0, 1)"])
        for name in ("attention", "projection", "input", "output", "word")
        for value in (-0.1, 1)
    ],
]


@pytest.mark.parametrize(
    ("command", "overrides", "named"), COMPOSED, ids=[" ".join(overrides) for _, overrides, _ in COMPOSED]
)
def test_both_settings_are_named(command: str, overrides: list[str], named: list[str]) -> None:
    with pytest.raises(InputError) as refusal:
        TYPED[command](changed_settings(command, *overrides))
    assert all(part in str(refusal.value) for part in named), str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a model, dense or from a checkpoint, fails the test."""

    def built(*_: Any) -> None:
        pytest.fail("a model was built for settings that cannot be right")

    monkeypatch.setattr(AllAttentionLM, "__init__", built)


OF_THE_TEXT = {  # the text has 220 training tokens and at most 32 words
    "cutoffs beyond the vocabulary": ({"model__cutoffs": [3, 5000]}, ["model.cutoffs=[3, 5000]", "vocab"]),
    "vocabulary of another size": ({"model__vocabulary_size": 7}, ["model.vocabulary_size=7", "tokenizer"]),
    "more streams than tokens": (
        {"schedule__batch_size": 500},
        ["220 tokens", "schedule.batch_size=500", "schedule.segment_length=6"],
    ),
    "a batch larger than the stream": (
        {"schedule__batch_size": 4, "schedule__segment_length": 55},
        ["220 tokens", "schedule.batch_size=4", "schedule.segment_length=55", "221"],
    ),
    "precision that the device lacks": (
        {"trainer__precision": "16-mixed"},
        ["trainer.precision=16-mixed", "trainer.accelerator=cpu"],
    ),
}


@pytest.mark.parametrize(("changes", "named"), OF_THE_TEXT.values(), ids=OF_THE_TEXT)
@pytest.mark.usefixtures("no_model")
def test_settings_that_contradict_the_text(runs: Any, changes: dict[str, Any], named: list[str]) -> None:
    settings = runs.pretraining("refused", **changes)
    with pytest.raises(InputError) as refusal:
        runs.run(settings)
    assert all(part in str(refusal.value) for part in named), str(refusal.value)
    assert not list(runs.at(settings).path.rglob("*.ckpt"))


OF_THE_CHECKPOINT = {  # its memory is 4 and its table has 16 rows
    "memory in evaluation": (
        {"eval__memory_length": 16},
        ["eval.memory_length=16", "model.position_rows=16"],
    ),
    "more streams than tokens": ({"schedule__batch_size": 500}, ["schedule.batch_size=500"]),
    "precision": ({"trainer__precision": "16-mixed"}, ["trainer.precision=16-mixed"]),
}


@pytest.mark.parametrize(("changes", "named"), OF_THE_CHECKPOINT.values(), ids=OF_THE_CHECKPOINT)
def test_settings_that_contradict_the_checkpoint(
    runs: Any,
    dense_run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    named: list[str],
) -> None:
    for name in ("run", "prune"):
        module = import_module(f"allattn.stages.{name}")
        monkeypatch.setattr(module, "build_model", lambda *_: pytest.fail("a model was built"))
    settings = runs.pruning("refused", dense_run.last, **changes)
    with pytest.raises(InputError) as refusal:
        runs.run(settings)
    assert all(part in str(refusal.value) for part in named), str(refusal.value)


def test_longest_memory_that_evaluation_can_have(runs: Any, dense_run: RunFolder) -> None:
    text = replace(runs.data)
    for memory, refused in ((15, False), (16, True)):
        settings = EvaluateSettings(
            checkpoint=str(dense_run.last), data=text, eval=EvaluationConfig(memory_length=memory)
        )
        if refused:
            with pytest.raises(InputError, match=r"eval\.memory_length=16.*model\.position_rows=16"):
                evaluate(settings)
        else:
            assert evaluate(settings)["tokens_scored"] > 0


@pytest.mark.parametrize(("split", "content"), [("valid", "\n"), ("test", "")])
@pytest.mark.usefixtures("no_model")
def test_split_without_a_token_to_score(runs: Any, tmp_path: Path, split: str, content: str) -> None:
    """One blank line is one token, and the first is never scored; it is not found only after hours."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"wiki.{name}.tokens").write_text(content if name == split else "a b c d\n" * 30)
    runs.data = replace(runs.data, folder=str(folder), cache_folder=str(tmp_path / "cache"))
    with pytest.raises(InputError, match=split):
        runs.run(runs.pretraining("short"))


@pytest.mark.parametrize(
    ("gpu", "bf16", "accelerator", "precision", "refused"),
    [
        (True, True, "auto", "16-mixed", False),
        (True, True, "cpu", "16-mixed", True),
        (True, False, "gpu", "bf16-mixed", True),
        (True, True, "gpu", "bf16-mixed", False),
        (False, False, "auto", "16-mixed", True),
        (False, False, "auto", "bf16-mixed", False),
    ],
)
def test_precision_of_the_device_that_is_used(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, bf16: bool, accelerator: str, precision: str, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    trainer = TrainerConfig(accelerator=accelerator, precision=precision)
    if refused:
        with pytest.raises(InputError, match=f"trainer.precision={precision}"):
            runner.check_precision(trainer)
    else:
        runner.check_precision(trainer)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["schedule.step=1,2"], ["schedule.step", "schedule.steps"]),
        (["+schedule.step=1,2"], ["schedule.step", "schedule.steps"]),
        (["+trainer.acumulation=1", "seed=1,2"], ["trainer.acumulation", "trainer.accumulation"]),
        (["model.heads=7", "seed=1,2"], ["model.width", "model.heads=7"]),
    ],
)
def test_refused_in_a_multirun(composed: CommandLine, arguments: list[str], named: list[str]) -> None:
    done = composed("train", "-m", "experiment=demo", *arguments)
    assert done.status == 2
    assert done.seen == []
    assert all(part in done.err for part in named), done.err
    assert "Traceback" not in done.err


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[[str, str], str]:
    """Write an experiment of one's own, the demo with changes; the argument that finds it."""

    def write(shared: str, train: str) -> str:
        folder = tmp_path / "conf"
        for group in ("data/experiment", "model", "experiment/train"):
            (folder / group).mkdir(parents=True)
            (folder / group / "mine.yaml").write_text((CONF / group / "demo.yaml").read_text())
        demo = (CONF / "experiment" / "demo.yaml").read_text()
        (folder / "experiment" / "mine.yaml").write_text(demo + shared)
        own = (CONF / "experiment/train/demo.yaml").read_text() + train
        (folder / "experiment" / "train" / "mine.yaml").write_text(own)
        return f"--config-dir={folder}"

    return write


def test_own_experiment_is_accepted(composed: CommandLine, experiment: Callable[[str, str], str]) -> None:
    done = composed("train", experiment("seed: 5\n", ""), "experiment=mine")
    assert (done.status, done.err) == (0, "")
    assert done.seen[0].seed == 5
    assert done.seen[0].schedule.steps == 600


@pytest.mark.parametrize(
    ("shared", "train", "named"),
    [
        ("optimizer:\n  learning_rat: 0.1\n", "", ["learning_rat", "optimizer.learning_rate"]),
        ("sede: 5\n", "", ["sede", "seed"]),
        ("", "  step: 3\n", ["step", "schedule.steps"]),
        ("", "  warmup_steps: 601\n", ["mine.yaml", "duplicate key warmup_steps"]),
        ("gates:\n  lambda_max: 3\n", "", ["gates"]),
    ],
    ids=["key in a group", "key", "key of the stage", "twice", "group of the other command"],
)
def test_refused_in_an_experiment_file(
    composed: CommandLine, experiment: Callable[[str, str], str], shared: str, train: str, named: list[str]
) -> None:
    done = composed("train", experiment(shared, train), "experiment=mine")
    assert done.status == 2, done.err
    assert done.seen == []
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert all(part in done.err for part in named), done.err


def test_contradiction_in_an_experiment_file(
    composed: CommandLine, experiment: Callable[[str, str], str]
) -> None:
    argument = experiment("", "").removeprefix("--config-dir=")
    stage = Path(argument) / "experiment" / "train" / "mine.yaml"
    stage.write_text(stage.read_text().replace("warmup_steps: 50", "warmup_steps: 601"))
    done = composed("train", f"--config-dir={argument}", "experiment=mine")
    assert (done.status, done.seen) == (2, [])
    assert "schedule.warmup_steps=601" in done.err
    assert "schedule.steps=600" in done.err
