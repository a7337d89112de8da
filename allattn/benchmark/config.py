"""What the benchmark measures, and on which sizes."""

from dataclasses import dataclass, field

from allattn.errors import InputError
from allattn.model.config import ModelConfig, check_model
from allattn.training.config import OptimizerConfig

WIKITEXT103 = 267_735  # words


@dataclass
class BenchmarkConfig:
    """Settings of the command. The paper's sizes but for 4 layers and 4 batch rows."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocabulary_size=WIKITEXT103, layers=4))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch_size: int = 4  # B
    segment_length: int = 192  # T; the memory is full
    heads: list[int] = field(
        default_factory=lambda: [2, 7, 5, 4] * 4
    )  # kept per layer, against all; 72 of 128
    checkpoint: str | None = None  # a pruned checkpoint or export folder instead of `heads`
    squares: list[int] = field(default_factory=lambda: [1024, 2048, 4096])  # of the matrix-product rate
    repeats: int = 5  # times every action is timed, after one warm-up
    device: str = "auto"
    peak_memory: bool = True  # measured in fresh processes, one after the other
    compile: bool = False  # time the compiled layers too (their peak would be the compiler's)
    seed: int = 1
    folder: str = "runs/benchmark"  # gets benchmark.json and benchmark.md


def check_benchmark(config: BenchmarkConfig) -> None:
    """Refuse settings that cannot be measured.

    Raises:
        InputError: names the setting.
    """
    check_model(config.model)
    if config.model.vocabulary_size is None:
        raise InputError("model.vocabulary_size is not set: give a number of words")
    if config.model.heads_kept is not None:
        raise InputError("model.heads_kept: the benchmark takes heads=[...], numbers of heads per layer")
    for name in ("batch_size", "segment_length", "repeats"):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if not config.squares or min(config.squares) < 1:
        raise InputError(f"squares={list(config.squares)}: give sizes of at least 1")
    if not config.heads or any(not 0 <= kept <= config.model.heads for kept in config.heads):
        raise InputError(
            f"heads={list(config.heads)}: give the number of heads kept of each layer, in "
            f"0..{config.model.heads}"
        )
