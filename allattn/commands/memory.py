"""What training takes on a GPU, by calculation: allattn memory [batch_size=192] [gpus=[80,40,24,16]]."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from allattn.benchmark.config import WIKITEXT103
from allattn.commands.run_command import Command
from allattn.errors import InputError
from allattn.model.config import ModelConfig, check_model
from allattn.training.config import PRECISIONS, OptimizerName
from allattn.training.fitting import GIB, fits, in_groups, training_bytes

CORES = ("recompute", "plain")


@dataclass
class MemoryConfig:
    """Settings of the command: the paper's."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocabulary_size=WIKITEXT103))
    optimizer: OptimizerName = OptimizerName.lamb
    batch_size: int = 192  # B: streams of one GPU
    segment_length: int = 192  # T; the memory is full
    precision: str = "bf16-mixed"
    accumulation: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    gpus: list[float] = field(default_factory=lambda: [80, 40, 24, 16])  # GiB of memory


def memory(config: MemoryConfig) -> dict[str, dict[int, int]]:
    """Print the bytes of training by core and accumulation, and on which GPUs each fits; the bytes.

    Raises:
        InputError: a setting cannot be calculated with.
    """
    _check(config)
    table = Table(title=f"GiB of training, by calculation, {config.precision}, and the GPUs that it fits")
    for column in ("accumulation", "streams at a time", *(f"{core} core" for core in CORES)):
        table.add_column(column, justify="right")
    with Console(stderr=True).status("calculating"):
        found = {core: _bytes(config, core) for core in CORES}
    for groups in config.accumulation:
        cells = [_cell(found[core][groups], config.gpus) for core in CORES]
        table.add_row(str(groups), str(config.batch_size // groups), *cells)
    Console().print(table)
    return found


def _bytes(config: MemoryConfig, core: str) -> dict[int, int]:
    how = (config.segment_length, core, config.precision, config.optimizer)
    whole, single = (training_bytes(config.model, rows, *how) for rows in (config.batch_size, 1))
    needed = in_groups(config.batch_size, whole, single)
    return {groups: needed(groups) for groups in config.accumulation}


def _cell(needed: int, gpus: list[float]) -> str:
    on = " ".join(f"{size:g}" for size in gpus if fits(needed, int(size * GIB)))
    return f"{needed / GIB:.1f} ({on or 'none'})"


def _check(config: MemoryConfig) -> None:
    check_model(config.model)
    if config.model.vocabulary_size is None:
        raise InputError("model.vocabulary_size is not set: give a number of words")
    if min(config.batch_size, config.segment_length) < 1:
        raise InputError("batch_size and segment_length must be at least 1")
    if config.precision not in PRECISIONS[1:]:
        raise InputError(f"precision={config.precision}: must be one of {', '.join(PRECISIONS[1:])}")
    for groups in config.accumulation:
        if groups < 1 or config.batch_size % groups:
            raise InputError(f"accumulation={groups} does not divide batch_size={config.batch_size}")


COMMAND = Command("memory", MemoryConfig, memory)
