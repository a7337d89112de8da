"""The rate at which the machine multiplies matrices: what the arithmetic of a model can reach at most."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.subject import PRECISIONS

Action = Callable[[], object]
Shape = tuple[int, int, int]  # rows, inner size, columns


def product_shapes(config: BenchmarkConfig) -> dict[str, Shape]:
    """What is multiplied, by name: large squares, and one layer's projections and persistent vectors."""
    model, tokens = config.model, config.batch_size * config.segment_length
    width, c, persistent = model.width, model.head_width, model.persistent_vectors
    layer = {
        "projection": (tokens, width, width),
        "scores": (tokens, c, persistent),
        "values": (tokens, persistent, c),
        "gradient of keys or values": (c, tokens, persistent),
    }
    squares = {f"square {size}": (size, size, size) for size in config.squares}
    return squares | {name: shape for name, shape in layer.items() if min(shape) > 0}


def product_actions(config: BenchmarkConfig, device: torch.device) -> dict[tuple[str, str], Action]:
    """What multiplies, by precision and name; operands and result are there already."""
    actions: dict[tuple[str, str], Action] = {}
    for precision in PRECISIONS:
        for name, (rows, inner, columns) in product_shapes(config).items():
            left = torch.randn(rows, inner, device=device).to(getattr(torch, precision))
            right = torch.randn(inner, columns, device=device).to(getattr(torch, precision))
            out = torch.empty(rows, columns, device=device, dtype=left.dtype)
            actions[precision, name] = partial(torch.mm, left, right, out=out)
    return actions


def product_record(
    config: BenchmarkConfig, seconds: dict[tuple[str, str], list[float]]
) -> dict[str, list[dict[str, Any]]]:
    """Per precision, for every product: its name, shape, multiply-adds and the seconds of each repetition."""
    found: dict[str, list[dict[str, Any]]] = {}
    shapes = product_shapes(config)
    for (precision, name), taken in seconds.items():
        rows, inner, columns = shapes[name]
        entry = {"name": name, "shape": [rows, inner, columns], "multiply_adds": rows * inner * columns}
        found.setdefault(precision, []).append(entry | {"seconds": taken})
    return found
