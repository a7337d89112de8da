"""Wall-clock times of actions that take turns, so that the machine's drift hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from allattn.data.segments import Segment
from allattn.model.gated import GatedLM

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


def layer_seconds_per_token(models: list[GatedLM], segments: list[Segment], repeats: int = 3) -> list[float]:
    """Median seconds per token of each model's stack of layers in evaluation, on given inputs and memory.

    Embedding, positions and softmax are the same in a dense and a cut model; they are outside the clock.

    Args:
        models: on the same device; left in evaluation mode.
        segments: (b, T) segments in stream order.
        repeats: timed passes.
    """
    tokens = sum(segment.inputs.numel() for segment in segments)
    device = models[0].device
    ids = [segment.inputs.to(device) for segment in segments]
    actions = {index: model.eval().layers_alone(ids) for index, model in enumerate(models)}
    return [statistics.median(taken) / tokens for taken in in_turn(actions, repeats, device).values()]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
