"""The rate at which the machine multiplies matrices: what the arithmetic of a model can reach at most."""

from typing import Any

import torch

from allattn.report.benchmark.config import BenchmarkConfig
from allattn.report.timing import in_turn


def product_shapes(config: BenchmarkConfig) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of the products tried: large squares, and those of one layer of the model."""
    model, tokens = config.model, config.batch_size * config.segment_length
    width, c, persistent = model.width, model.head_width, model.persistent_vectors
    of_a_layer = [(tokens, width, width), (tokens, c, persistent), (tokens, persistent, c)]
    squares = [(size, size, size) for size in config.squares]
    return squares + [shape for shape in of_a_layer if min(shape) > 0]


def measure_products(config: BenchmarkConfig, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Per precision, for every shape: its multiply-adds and the seconds of each repetition."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("float32", "bfloat16"):
        actions = {}
        for rows, inner, columns in product_shapes(config):
            left = torch.randn(rows, inner, device=device).to(getattr(torch, name))
            right = torch.randn(inner, columns, device=device).to(getattr(torch, name))
            out = torch.empty(rows, columns, device=device, dtype=left.dtype)
            actions[rows, inner, columns] = lambda a=left, b=right, out=out: torch.mm(a, b, out=out)
        found[name] = [
            {"shape": list(shape), "multiply_adds": shape[0] * shape[1] * shape[2], "seconds": seconds}
            for shape, seconds in in_turn(actions, config.repeats, device).items()
        ]
    return found
