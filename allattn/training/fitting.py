"""How many groups of streams a step needs so that it fits a GPU, by calculation."""

from dataclasses import replace

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.training.config import OptimizerName
from allattn.training.step_memory import step_memory

GIB = 2**30
_UNUSED = 0.1  # of a GPU's memory: what torch's allocator leaves between tensors
_CUDA = GIB  # CUDA and its libraries


def training_bytes(
    config: ModelConfig, rows: int, tokens: int, core: str, precision: str, optimizer: OptimizerName
) -> int:
    """Bytes of training on a GPU, all heads present; arguments as of `step_memory`.

    One layer and two are calculated: each further layer takes what the second takes.
    """
    one, two = (
        step_memory(
            replace(config, layers=layers, heads_kept=None, output_scale=None),
            rows,
            tokens,
            core,
            precision,
            optimizer,
            keep_buffers=False,
        ).total
        for layers in (1, 2)
    )
    return one + (config.layers - 1) * (two - one)


def fits(needed: int, memory: int) -> bool:
    """Whether training that takes `needed` bytes runs on a GPU with `memory` bytes."""
    return needed <= (1 - _UNUSED) * memory - _CUDA


def fitting_accumulation(
    config: ModelConfig,
    streams: int,
    tokens: int,
    core: str,
    precision: str,
    optimizer: OptimizerName,
    memory: int,
) -> int:
    """The smallest trainer.accumulation with which a step fits.

    Args:
        config: of the model.
        streams: B.
        tokens: T.
        core: plain or recompute.
        precision: as trainer.precision, not auto.
        optimizer: whose moments are kept.
        memory: bytes of the GPU.

    Raises:
        InputError: not even one stream at a time fits.
    """
    needed = 0
    for groups in range(1, streams + 1):
        if streams % groups == 0:
            needed = training_bytes(config, streams // groups, tokens, core, precision, optimizer)
            if fits(needed, memory):
                return groups
    raise InputError(
        f"trainer.accumulation=0: one stream at a time takes {needed / GIB:.1f} GiB by calculation, too much "
        f"for a GPU of {memory / GIB:.1f} GiB: lower schedule.segment_length or the model's sizes"
    )
