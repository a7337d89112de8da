import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allattn.training.run_folder import RunFolder
from support.processes import run

Arguments = Callable[..., list[str]]
DROPOUTS = ("attention", "projection", "input", "output", "word")


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """End what a failed test left running."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 40 words: 660 training tokens, 132 and 99 of the other splits."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 9)):
        words = [[f"w{min(rng.randrange(40), rng.randrange(40))}" for _ in range(10)] for _ in range(lines)]
        (folder / f"wiki.{split}.tokens").write_text("".join(f"{' '.join(line)}\n" for line in words))
    return folder


@pytest.fixture(scope="session")
def tiny(text: Path) -> Arguments:
    """Arguments of a tiny run in seconds: `name`, `runs_folder`, and settings that change it."""

    def arguments(folder: RunFolder, *changes: str) -> list[str]:
        return [
            "experiment=demo",
            f"name={folder.path.name}",
            f"runs_folder={folder.path.parent}",
            "data=files",
            f"data.folder={text}",
            f"data.cache_folder={text}/cache",
            "schedule.batch_size=4",
            "schedule.segment_length=6",
            "eval.rows=3",
            "eval.segment_length=8",
            "eval.interval=10",
            "trainer.accelerator=cpu",
            "trainer.checkpoint_interval=5",
            "trainer.log_interval=1",
            "trainer.progress=false",
            "logger=none",
            *changes,
        ]

    return arguments


@pytest.fixture(scope="session")
def pretraining(tiny: Arguments) -> Arguments:
    """Arguments of train.py for a tiny model; `dropout` is the experiment's unless given."""

    def arguments(folder: RunFolder, *changes: str, dropout: float | None = None) -> list[str]:
        sizes = [
            "model.layers=2",
            "model.width=16",
            "model.heads=4",
            "model.persistent_vectors=4",
            "model.memory_length=4",
            "model.position_rows=16",
        ]
        if dropout is not None:
            sizes += [f"model.{name}_dropout={dropout}" for name in DROPOUTS]
        return tiny(folder, "data.minimum_count=1", "schedule.warmup_steps=5", *sizes, *changes)

    return arguments


@pytest.fixture(scope="session")
def pruning(tiny: Arguments) -> Arguments:
    """Arguments of prune.py: the freeze is at step 12 and closes some of the heads."""

    def arguments(folder: RunFolder, checkpoint: Path, *changes: str) -> list[str]:
        return tiny(
            folder,
            f"checkpoint={checkpoint}",
            "schedule.steps=24",
            "gates.freeze_step=12",
            "gates.lambda_warmup_steps=4",
            "gates.lambda_max=0.005",
            "gates.initial_pi=0.1",
            "gates.learning_rate_ratio=20",
            *changes,
        )

    return arguments


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments) -> RunFolder:
    """A finished run of train.py with dropout; not to be written to."""
    base = tmp_path_factory.mktemp("dense")
    folder = RunFolder(base / "dense")
    run(base / "output", "train.py", *pretraining(folder, "schedule.steps=10"))
    return folder


@pytest.fixture(scope="session")
def dense_without_dropout(tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments) -> RunFolder:
    """A finished run of train.py without dropout; not to be written to."""
    base = tmp_path_factory.mktemp("dense_without_dropout")
    folder = RunFolder(base / "dense")
    run(base / "output", "train.py", *pretraining(folder, "schedule.steps=10", dropout=0.0))
    return folder
