"""Whatever the settings are: two steps with a finite loss, or one line that refuses them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from allattn import stages
from allattn.data.config import DataConfig
from allattn.errors import InputError
from allattn.settings import PretrainSettings, PruneSettings, pretrain_settings, prune_settings
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder

NAN, INF = math.nan, math.inf
FEW = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Each setting with values that are right by themselves, and values that never are. Together even the right
# ones often contradict each other.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "seed": ([0, 1], [-1]),
    "optimizer.name": (["lamb", "adamw", "muon"], []),
    "optimizer.learning_rate": ([1e-8, 0.01, 0.5], [0.0, -1.0, NAN, INF]),
    "optimizer.betas": ([[0.9, 0.999], [0.0, 0.0]], [[0.9], [0.9, 1.0], [NAN, 0.9]]),
    "optimizer.eps": ([1e-6, 1e-3], [-1.0, NAN, 0.0]),
    "optimizer.weight_decay": ([0.0, 0.1], [-0.1, NAN]),
    "optimizer.gradient_clip": ([0.0, 0.5], [-1.0, INF]),
    "schedule.batch_size": ([6, 1, 2, 219], [0, -1, 1000]),
    "schedule.segment_length": ([2, 1, 7, 219], [0, 1000]),
    "schedule.steps": ([2], [0]),
    "schedule.warmup_steps": ([0, 1, 2], [3, -1]),
    "schedule.shape": (["cosine", "constant"], []),
    "schedule.final_ratio": ([0.0, 0.1, 1.0], [-0.1, 1.1, NAN]),
    "schedule.tokens": ([None, 8], [0, -5]),
    "eval.rows": ([1, 3, 1000], [0]),
    "eval.segment_length": ([1, 9, 50], [0]),
    "eval.memory_length": ([None, 1, 5, 30], [0, -1]),
    "eval.mode": (["memory", "window"], []),
    "eval.context": ([1, 4, 100], [0]),
    "eval.stride": ([1, 3, 100], [0]),
    "eval.interval": ([0, 1, 5], [-1]),
    "trainer.precision": (["auto", "32-true", "64-true", "bf16-mixed"], ["16-mixed", "8-true", ""]),
    "trainer.accumulation": ([0, 1, 2, 3], [-1]),
    "trainer.log_interval": ([1], [0]),
    "trainer.checkpoint_interval": ([1, 5], [0]),
    "trainer.accelerator": (["cpu"], ["abacus", ""]),
    "trainer.strategy": (["auto"], ["telepathy"]),
}
DROPOUT: tuple[list[Any], list[Any]] = ([0.0, 0.3, 0.999], [-0.1, 1.0, NAN])
DENSE = SHARED | {
    "model.layers": ([2, 1], [0]),
    "model.width": ([12, 1, 6, 8], [0, -4]),
    "model.heads": ([2, 1, 3], [0]),
    "model.persistent_vectors": ([0, 1, 3], [-1]),
    "model.memory_length": ([1, 3, 6], [0]),
    "model.position_rows": ([300, 4, 12], [0]),
    "model.same_length": ([True, False], []),
    "model.cutoffs": ([[], [2], [3, 9]], [[9, 3], [5, 5], [0, 4], [3, 500], [-1]]),
    "model.div": ([1, 2, 4], [0]),
    "model.vocabulary_size": ([None], [0, 5, 10_000]),
    "model.attention_dropout": DROPOUT,
    "model.projection_dropout": DROPOUT,
    "model.input_dropout": DROPOUT,
    "model.output_dropout": DROPOUT,
    "model.word_dropout": DROPOUT,
}
GATED = SHARED | {
    "gates.lambda_max": ([0.02, 0.0, 5.0], [-0.1, NAN, INF]),
    "gates.lambda_warmup_steps": ([0, 1, 2], [3, -1]),
    "gates.freeze_step": ([1, 2], [0, 3]),
    "gates.initial_pi": ([0.0, -50.0, 2.0, 50.0], [NAN, INF]),
    "gates.output_scaling": ([True, False], []),
    "gates.scale_gradient": ([False, True], []),
    "gates.beta": ([0.33, 1.0, 1e-3], [0.0, -1.0]),
    "gates.gamma": ([-0.1, -1e-6, -5.0], [0.0, 0.1]),
    "gates.zeta": ([1.1, 1.000001, 6.0], [1.0, 0.9]),
    "gates.threshold": ([0.5, 1e-6, 0.999999], [0.0, 1.0, NAN]),
    "gates.penalty": (["stretched", "hard"], []),
    "gates.learning_rate_ratio": ([1.0, 1000.0], [0.0]),
    "gates.target_sparsity": ([0.5, None, 0.0, 0.999], [1.0, -0.1, NAN]),
    "gates.target_gain": ([1.0, 5.0], [0.0]),
    "gates.selection": (
        ["l0", "random", "magnitude", "gradient", "iterative", "circuit_ahon_ln", "flap"],
        ["awft", "ftvvn_ln"],
    ),
    "gates.selection_steps": ([None, 1, 2, 3], [0]),
    "gates.iterations": ([2, 1, 3], [0]),
    "gates.scope": (["all_layers", "each_layer"], []),
    "distill.weight": ([0.0, 0.5, 1.0], [-0.1, 1.1, NAN]),
    "distill.temperature": ([1.0, 0.1, 5.0], [0.0, INF]),
    "distill.gates": ([False, True], []),
}


@st.composite
def drawn(draw: st.DrawFn, table: dict[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    """A value of each setting, mostly its first, which go together; one draw in four has a wrong one."""
    values = {name: draw(st.sampled_from([*[right[0]] * 6, *right])) for name, (right, _) in table.items()}
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from([name for name, (_, wrong) in table.items() if wrong]))
        values[name] = draw(st.sampled_from(table[name][1]))
    return values


def train_or_refuse(
    schema: type, typed: Callable[[DictConfig], Any], stage: Callable[[Any], Any], values: dict[str, Any]
) -> str | None:
    """Run a stage: None where it trained to finite numbers, else the line that refused it."""
    config = OmegaConf.structured(schema)
    for name, value in values.items():
        OmegaConf.update(config, name, value)
    try:
        run = typed(config)
        result = stage(run)
    except InputError as refusal:
        return str(refusal)
    folder = RunFolder(Path(run.runs_folder) / run.name)
    rows = read_metrics(folder.metrics)
    assert rows
    assert all(math.isfinite(float(row["loss"])) for row in rows if "loss" in row)
    for model in ("dense", "pruned"):
        for split in ("valid", "test"):
            assert math.isfinite(result[model][split]["nats_per_token"]) if model in result else True
    return None


def assert_one_line(refusal: str | None) -> None:
    assert refusal is None or (refusal.strip() and "\n" not in refusal)


@pytest.fixture
def shared(data: DataConfig, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Settings of a new run on the tiny text."""
    count = itertools.count()

    def values() -> dict[str, Any]:
        text = {f"data.{name}": value for name, value in asdict(data).items() if name in ("source", "folder")}
        return text | {
            "name": f"run{next(count)}",
            "runs_folder": str(tmp_path),
            "data.cache_folder": data.cache_folder,
            "logger.wandb": "none",
            "trainer.progress": False,
        }

    return values


outcomes: dict[str, list[str | None]] = {"train": [], "prune": []}


@given(values=drawn(DENSE))
@settings(FEW, max_examples=35)
def test_pretraining(shared: Callable[[], dict[str, Any]], values: dict[str, Any]) -> None:
    found = train_or_refuse(PretrainSettings, pretrain_settings, stages.pretrain, shared() | values)
    assert_one_line(found)
    outcomes["train"].append(found)


@given(values=drawn(GATED))
@settings(FEW, max_examples=45)
def test_pruning(shared: Callable[[], dict[str, Any]], dense_run: RunFolder, values: dict[str, Any]) -> None:
    own = shared() | {"checkpoint": str(dense_run.last)}
    found = train_or_refuse(PruneSettings, prune_settings, stages.prune, own | values)
    assert_one_line(found)
    outcomes["prune"].append(found)


@pytest.mark.parametrize("stage", ["train", "prune"])
def test_both_ends_were_seen(stage: str) -> None:
    """Of the draws above some trained and some were refused, for more than one reason."""
    if not outcomes[stage]:
        pytest.skip("the draws were made in another process")
    trained = outcomes[stage].count(None)
    assert trained >= 8
    assert len({line for line in outcomes[stage] if line}) >= 4
