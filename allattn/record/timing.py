"""Wall-clock times of actions that take turns, so that the machine's drift hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM, Memory

Name = TypeVar("Name")


def in_turn(
    actions: Mapping[Name, Callable[[], object]], repeats: int, device: torch.device
) -> dict[Name, list[float]]:
    """Seconds of every action, `repeats` times; each round runs all of them in order.

    A first round is a warm-up and not in the result. The device has finished its work whenever the clock is
    read.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, action in actions.items():
            _synchronize(device)
            began = time.perf_counter()
            action()
            _synchronize(device)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def layer_seconds_per_token(
    models: list[AllAttentionLM], segments: list[Segment], repeats: int = 3
) -> list[float]:
    """Median seconds per token of each model's stack of layers in evaluation, on given inputs and memory.

    Embedding, positions and softmax are the same in a dense and a cut model; they are outside the clock.

    Args:
        models: on the same device; left in evaluation mode.
        segments: (b, T) segments in stream order.
        repeats: timed passes.
    """
    tokens = sum(segment.inputs.numel() for segment in segments)
    actions = {index: _layers_alone(model.eval(), segments) for index, model in enumerate(models)}
    device = models[0].positions.table.device
    return [statistics.median(taken) / tokens for taken in in_turn(actions, repeats, device).values()]


def _layers_alone(model: AllAttentionLM, segments: list[Segment]) -> Callable[[], None]:
    """An action that puts the segments, embedded already and each with its memory, through the layers."""
    device = model.positions.table.device
    memory = model.empty_memory(len(segments[0].inputs))
    given: list[tuple[Tensor, Memory, Tensor, int]] = []
    with torch.no_grad():
        for segment in segments:
            ids = segment.inputs.to(device)
            positions, window = model.positions_and_window(memory[0].shape[1] + ids.shape[1])
            given.append((model.embedding(ids), memory, positions, window))
            _, memory = model.through_layers(*given[-1])

    def through() -> None:
        with torch.no_grad():
            for inputs in given:
                model.through_layers(*inputs)

    return through


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
