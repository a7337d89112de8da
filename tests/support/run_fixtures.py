import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn import stages
from allattn.data.config import DataConfig, Source
from allattn.data.segments import Segment
from allattn.errors import Interrupted
from allattn.model.config import ModelConfig
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.settings import PretrainSettings, PruneSettings, RunSettings
from allattn.training.config import (
    EvaluationConfig,
    LoggerConfig,
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
    Shape,
    TrainerConfig,
    WandbMode,
)
from allattn.training.language_task import LanguageTask
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder

DROPOUT = {f"{name}_dropout": 0.2 for name in ("attention", "projection", "input", "output", "word")}
MEASURED = ("tokens_per_second", "peak_memory_gib", "mfu")  # columns that no two runs share
STEPS = 10


class Runs:
    """Tiny runs below one folder, on a text of a few hundred words."""

    def __init__(self, data: DataConfig, folder: Path) -> None:
        self.data = data
        self.folder = folder

    def pretraining(self, name: str, **changes: Any) -> PretrainSettings:
        """Settings of a dense run of 10 steps, dropout on; `a__b=value` changes setting a.b."""
        model = ModelConfig(
            layers=2,
            width=16,
            heads=4,
            persistent_vectors=4,
            memory_length=4,
            position_rows=16,
            cutoffs=[],
            **DROPOUT,
        )
        settings = PretrainSettings(**self._shared(name), model=model)
        settings.schedule = replace(settings.schedule, warmup_steps=3, shape=Shape.cosine)
        return _changed(settings, changes)

    def pruning(self, name: str, checkpoint: Path, **changes: Any) -> PruneSettings:
        """Settings of a pruning run that freezes at step 5 of 10."""
        gates = GatesConfig(lambda_max=0.05, lambda_warmup_steps=2, freeze_step=5, learning_rate_ratio=2)
        settings = PruneSettings(**self._shared(name), checkpoint=str(checkpoint), gates=gates)
        settings.optimizer.learning_rate = 0.001
        return _changed(settings, changes)

    def run(self, settings: RunSettings) -> RunFolder:
        """Run the stage of `settings` (or go on with it)."""
        if isinstance(settings, PretrainSettings):
            stages.pretrain(settings)
        else:
            assert isinstance(settings, PruneSettings)
            stages.prune(settings)
        return self.at(settings)

    def at(self, settings: RunSettings) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.folder / settings.name)

    def _shared(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "runs_folder": str(self.folder),
            "data": self.data,
            "optimizer": OptimizerConfig(name=OptimizerName.lamb, learning_rate=0.01),
            "schedule": ScheduleConfig(
                batch_size=4, segment_length=6, steps=STEPS, warmup_steps=0, shape=Shape.constant
            ),
            "eval": EvaluationConfig(rows=3, segment_length=8, interval=4),
            "trainer": TrainerConfig(
                accelerator="cpu", precision="32-true", log_interval=1, checkpoint_interval=3, progress=False
            ),
            "logger": LoggerConfig(wandb=WandbMode.none),
        }


def _changed(settings: Any, changes: dict[str, Any]) -> Any:
    for name, value in changes.items():
        *groups, last = name.split("__")
        target: Any = settings
        for group in groups:
            target = getattr(target, group)
        assert hasattr(target, last)
        setattr(target, last, value)
    return settings


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A text of 30 words: 220 training tokens (9 segments of 6 in 4 streams), 60 for each other split."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for split, lines in (("train", 20), ("valid", 6), ("test", 5)):
        text = [
            " ".join(f"w{min(rng.randrange(30), rng.randrange(30))}" for _ in range(10)) for _ in range(lines)
        ]
        (folder / f"wiki.{split}.tokens").write_text("\n".join(text) + "\n")
    return DataConfig(source=Source.files, folder=str(folder), cache_folder=str(folder / "cache"))


@pytest.fixture(scope="session")
def runs_below(data: DataConfig) -> Callable[[Path], Runs]:
    """Tiny runs below a given folder."""
    return lambda folder: Runs(replace(data), folder)


@pytest.fixture
def runs(runs_below: Callable[[Path], Runs], tmp_path: Path) -> Runs:
    """Tiny runs in the test's own folder."""
    return runs_below(tmp_path / "runs")


@pytest.fixture(scope="session")
def dense_run(runs_below: Callable[[Path], Runs], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished dense run; not to be written to."""
    own = runs_below(tmp_path_factory.mktemp("dense"))
    return own.run(own.pretraining("dense"))


@pytest.fixture
def uneven_gates(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Let gates start far apart, so that the freeze closes known heads; the heads that stay."""
    kept = [[0, 2, 3], [1]]
    build = HeadGates.__init__

    def uneven(self: HeadGates, *args: Any) -> None:
        build(self, *args)
        with torch.no_grad():
            for pi, stays in zip(self.pi, kept, strict=True):
                pi.copy_(torch.tensor([2.0 if head in stays else -2.0 for head in range(len(pi))]))

    monkeypatch.setattr(HeadGates, "__init__", uneven)
    return kept


@contextmanager
def _in_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in the middle of optimizer step `step` (the first is 1)."""
    original = LanguageTask.training_step

    def training_step(self: LanguageTask, batch: Segment, batch_idx: int) -> Tensor:
        if self.global_step == step - 1 and batch.group == 0:
            act()
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "training_step", training_step)
        yield


class Crash(Exception):
    """Stands for a power cut: nothing is saved."""


class Stop:
    """Ways to end a run early."""

    def by_signal(self, run: Callable[[], Any], step: int, number: signal.Signals = signal.SIGTERM) -> None:
        """A signal during optimizer step `step`; the run saves itself."""
        with _in_step(step, lambda: os.kill(os.getpid(), number)), pytest.raises(Interrupted) as stop:
            run()
        assert f"at step {step}" in str(stop.value)
        assert stop.value.number == number

    acting_in_step = staticmethod(_in_step)

    def by_crash(self, run: Callable[[], Any], step: int) -> None:
        """An exception during optimizer step `step`."""

        def crash() -> None:
            raise Crash

        with _in_step(step, crash), pytest.raises(Crash):
            run()


@pytest.fixture(scope="session")
def stop() -> Stop:
    """End a run by a signal or by a crash."""
    return Stop()


def _rows(folder: RunFolder) -> list[dict[str, str]]:
    rows = read_metrics(folder.metrics)
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


@pytest.fixture(scope="session")
def rows() -> Callable[[RunFolder], list[dict[str, str]]]:
    """What metrics.csv holds, without measured times."""
    return _rows
