"""The benchmark's plain core: the same numbers and gradients as the loop and as the package's cores."""

import random

import pytest
import torch
from support.reference import assert_close, gradients, reference_attend
from torch import Tensor

from allattn.benchmark.yardstick import attend_yardstick
from allattn.model.cores.core import attend, attend_plain

Shape = tuple[int, int, int, int, int, int, int]  # B, T, memory, h, c, N, window


def shapes() -> list[Shape]:
    pick = random.Random(5)
    found = []
    for case in range(24):
        window = pick.randint(0, 7)
        memory = (0, window, pick.randint(0, window), window + 3)[case % 4]
        found.append((pick.randint(1, 3), pick.randint(1, 7), memory, case % 8 + 1, pick.choice([1, 3, 8]),
                      pick.choice([0, 1, 9]), window))  # fmt: skip
    return found


def inputs(shape: Shape, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    B, T, memory, h, c, N, _ = shape
    S = T + memory
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(B, T, h, c), (B, S, h, c), (B, S, h, c), (S, h, c), (h, c), (h, c), (N, h, c), (N, h, c)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_equals_the_loop_with_gradients(shape: Shape) -> None:
    given, window = inputs(shape), shape[-1]
    z, reference = attend_yardstick(*given, window, 0.0), reference_attend(*given, window)
    assert_close(z, reference, 1e-10)
    weight = torch.randn_like(reference)
    pairs = zip(
        gradients((z * weight).sum(), given), gradients((reference * weight).sum(), given), strict=True
    )
    for actual, expected in pairs:
        assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_the_packages_cores(dtype: torch.dtype) -> None:
    shape = (3, 20, 16, 4, 8, 40, 16)
    given = inputs(shape, dtype)
    z = attend_yardstick(*given, 16, 0.0)
    assert z.dtype == dtype
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for core in (attend_plain, attend):
        assert_close(z.double(), core(*given, 16, 0.0).double(), tolerance)


def test_dropout_is_on() -> None:
    given = inputs((2, 6, 4, 2, 8, 30, 4))
    without = attend_yardstick(*given, 4, 0.0)
    draws = torch.stack([attend_yardstick(*given, 4, 0.3).detach() for _ in range(2000)])
    off = (draws.mean(0) - without) / (draws.std(0) / 2000**0.5)
    assert draws.std(0).min() > 0
    assert off.abs().max() < 5
