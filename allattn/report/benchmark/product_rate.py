"""The rate at which the machine multiplies matrices: what the arithmetic of a model can reach at most."""

from typing import Any

import torch

from allattn.report.benchmark.config import BenchmarkConfig
from allattn.report.timing import in_turn

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


def measure_products(config: BenchmarkConfig, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Per precision, for every product: its name, shape, multiply-adds and the seconds of each repetition."""
    found: dict[str, list[dict[str, Any]]] = {}
    shapes = product_shapes(config)
    for precision in ("float32", "bfloat16"):
        actions = {}
        for name, (rows, inner, columns) in shapes.items():
            left = torch.randn(rows, inner, device=device).to(getattr(torch, precision))
            right = torch.randn(inner, columns, device=device).to(getattr(torch, precision))
            out = torch.empty(rows, columns, device=device, dtype=left.dtype)
            actions[name] = lambda a=left, b=right, out=out: torch.mm(a, b, out=out)
        found[precision] = [
            {
                "name": name,
                "shape": list(shapes[name]),
                "multiply_adds": shapes[name][0] * shapes[name][1] * shapes[name][2],
                "seconds": seconds,
            }
            for name, seconds in in_turn(actions, config.repeats, device).items()
        ]
    return found
