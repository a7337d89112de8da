"""Time per token of two models, measured in turn so that the machine's drift hits both."""

import statistics
import time

import torch

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM


def seconds_per_token(models: list[AllAttentionLM], segments: list[Segment], repeats: int = 3) -> list[float]:
    """Median seconds per token of each model's layers in evaluation, memory carried.

    The embedding and the softmax are the same in a dense and a cut model, so only the layers' stack is
    timed. The first pass of every model is a warm-up.

    Args:
        models: on the same device.
        segments: (b, T) segments in stream order.
        repeats: timed passes.
    """
    times: list[list[float]] = [[] for _ in models]
    tokens = sum(segment.inputs.numel() for segment in segments)
    for repeat in range(repeats + 1):
        for model, taken in zip(models, times, strict=True):
            began = _run(model, segments)
            if repeat:
                taken.append((time.perf_counter() - began) / tokens)
    return [statistics.median(taken) for taken in times]


def _run(model: AllAttentionLM, segments: list[Segment]) -> float:
    """Run the layers over the segments; the start time, after the device has finished earlier work."""
    device = model.positions.table.device
    model.eval()
    memory = model.empty_memory(len(segments[0].inputs))
    _synchronize(device)
    began = time.perf_counter()
    with torch.no_grad():
        for segment in segments:
            _, memory = model.hidden(segment.inputs.to(device), memory)
    _synchronize(device)
    return began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
