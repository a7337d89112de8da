"""How many groups of streams a step needs so that it fits a GPU, by calculation."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.training.config import OptimizerName
from allattn.training.step_memory import step_memory

GIB = 2**30
_UNUSED = 0.1  # of a GPU's memory: what torch's allocator leaves between tensors
_CUDA = GIB  # CUDA and its libraries


class Groups(NamedTuple):
    """Into how many groups a step goes, and the bytes of training so."""

    accumulation: int
    needed: int


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


def in_groups(streams: int, whole: int, single: int) -> Callable[[int], int]:
    """Bytes of training by the number of groups, from those of all `streams` at a time and of one.

    Nearly all that a step makes grows evenly with its streams.
    """
    each = (whole - single) / max(1, streams - 1)
    return lambda groups: round(single + each * (streams // groups - 1))


def fitting_groups(
    config: ModelConfig,
    streams: int,
    tokens: int,
    core: str,
    precision: str,
    optimizer: OptimizerName,
    memory: int,
) -> Groups:
    """The fewest groups with which a step fits.

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
    how = (tokens, core, precision, optimizer)
    whole = training_bytes(config, streams, *how)
    if fits(whole, memory):
        return Groups(1, whole)
    single = training_bytes(config, 1, *how)
    if not fits(single, memory):
        raise InputError(
            f"trainer.accumulation=0: one stream at a time takes {single / GIB:.1f} GiB by calculation, too "
            f"much for a GPU of {memory / GIB:.1f} GiB: lower schedule.segment_length or the model's sizes"
        )
    needed = in_groups(streams, whole, single)
    divisors = (groups for groups in range(2, streams + 1) if streams % groups == 0)
    fewest = next(groups for groups in divisors if fits(needed(groups), memory))
    return Groups(fewest, needed(fewest))
