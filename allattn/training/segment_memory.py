"""Segment memory by stream: what a checkpoint holds does not say which process or group read which streams.

One tensor (B, M', d) per layer, streams in the order of the text; an empty list where nothing was read yet.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allattn.data.segments import Segment, stream_rows
from allattn.model.gated import GatedLM, Memory, Sizes


def by_stream(parts: Sequence[dict[int, Memory]]) -> Memory:
    """All streams' memory, L tensors (B, M', d), from each process's memory by accumulation group."""
    in_order = [part[group] for group in sorted(parts[0] if parts else ()) for part in parts]
    return [torch.cat(layer) for layer in zip(*in_order, strict=True)]


def of_process(memory: Memory, accumulation: int, rank: int, world_size: int) -> dict[int, Memory]:
    """The inverse of `by_stream` for one process, whatever the number of groups and processes is now."""
    shares = {}
    for group in range(accumulation if memory else 0):
        rows = stream_rows(len(memory[0]), accumulation, group, rank, world_size)
        shares[group] = [layer[rows.start : rows.stop] for layer in memory]
    return shares


def memory_before(memory: dict[int, Memory], batch: Segment, model: GatedLM) -> Memory:
    """Of a model's memory by group, that of the segment before `batch`; empty where the texts begin."""
    before = memory.get(batch.group)
    if before is None or batch.starts_over:
        return model.empty_memory(len(batch.inputs))
    return before


def is_memory(memory: Any, config: Sizes) -> bool:
    """Whether a checkpoint's entry is the memory of a model of these sizes, in some number of streams."""
    if memory == []:
        return True
    if not isinstance(memory, list) or not all(isinstance(layer, Tensor) for layer in memory):
        return False
    streams, length, _ = memory[0].shape if memory[0].ndim == 3 else (0, 0, 0)
    shape = (streams, length, config.width)
    return (
        len(memory) == config.layers
        and streams > 0
        and length <= config.memory_length
        and all(layer.shape == shape and layer.is_floating_point() for layer in memory)
        and all(bool(torch.isfinite(layer).all()) for layer in memory)
    )
