"""allattn memory: bytes by core and accumulation, and the GPUs that they fit."""

from collections.abc import Callable

import pytest

from allattn.commands.memory import MemoryConfig, memory
from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.training.config import OptimizerName
from allattn.training.fitting import training_bytes

SMALL = ModelConfig(vocabulary_size=500, layers=3, width=32, heads=2, persistent_vectors=64, cutoffs=[100])


def test_bytes_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    config = MemoryConfig(SMALL, batch_size=8, segment_length=16, accumulation=[1, 4], gpus=[80, 1])
    found = memory(config)
    one, four = (
        training_bytes(SMALL, rows, 16, "plain", "bf16-mixed", OptimizerName.lamb) for rows in (8, 2)
    )
    of_whole_rows = 0.05  # a table of positions and a band's few words do not grow evenly with the rows
    assert found["plain"] == {1: one, 4: pytest.approx(four, rel=of_whole_rows)}
    out = capsys.readouterr().out
    assert out.count("(80)") == 4, "one GiB is CUDA's own"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: setattr(config, "accumulation", [5]),
            "accumulation=5 does not divide",
        ),
        (lambda config: setattr(config, "precision", "auto"), "precision=auto: must be one of 32-true"),
        (lambda config: setattr(config, "segment_length", 0), "must be at least 1"),
        (lambda config: setattr(config.model, "vocabulary_size", None), "model.vocabulary_size is not set"),
    ],
)
def test_refused(change: Callable[[MemoryConfig], None], message: str) -> None:
    config = MemoryConfig()
    change(config)
    with pytest.raises(InputError, match=message):
        memory(config)
