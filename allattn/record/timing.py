"""Wall-clock times of actions that take turns, so that the machine's drift hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM

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


def seconds_per_token(models: list[AllAttentionLM], segments: list[Segment], repeats: int = 3) -> list[float]:
    """Median seconds per token of each model's layers in evaluation, memory carried.

    The embedding and the softmax are the same in a dense and a cut model, so only the layers' stack is
    timed.

    Args:
        models: on the same device; left in evaluation mode.
        segments: (b, T) segments in stream order.
        repeats: timed passes.
    """
    device = models[0].positions.table.device
    tokens = sum(segment.inputs.numel() for segment in segments)

    def read(model: AllAttentionLM) -> None:
        memory = model.empty_memory(len(segments[0].inputs))
        with torch.no_grad():
            for segment in segments:
                _, memory = model.hidden(segment.inputs.to(device), memory)

    actions = {index: (lambda model=model: read(model.eval())) for index, model in enumerate(models)}
    return [statistics.median(taken) / tokens for taken in in_turn(actions, repeats, device).values()]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
