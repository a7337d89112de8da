"""Inputs of attention cores, all cores there are, and how far one is from exact results."""

from functools import partial

import torch
from torch import Tensor

from allattn.benchmark.yardstick import attend_yardstick
from allattn.model.cores.inputs import Core, CoreInputs
from allattn.model.cores.plain import attend_plain
from allattn.model.cores.recompute import attend_recompute
from allattn.model.cores.workspace import ELSEWHERE, ON_CPU
from support.reference import reference_attend

NAMES = CoreInputs._fields[:8]
Shape = tuple[int, int, int, int, int, int, int]  # B, T, memory, h, c, N, window

# The recomputing core as a CPU has it, and with the noise and the buffers of every other device.
RECOMPUTE = {
    "recompute": partial(attend_recompute, workspace=ON_CPU),
    "elsewhere": partial(attend_recompute, workspace=ELSEWHERE),
}
CORES: dict[str, Core] = {"plain": attend_plain, **RECOMPUTE}
ALL_CORES: dict[str, Core] = {**CORES, "yardstick": attend_yardstick}

SHAPES: dict[str, Shape] = {
    "full memory": (2, 5, 4, 3, 4, 5, 4),
    "partial memory": (2, 6, 3, 2, 4, 5, 7),
    "no memory": (3, 6, 0, 2, 3, 1, 4),
    "memory longer than the window": (2, 5, 7, 2, 8, 11, 4),
    "growing": (2, 4, 2, 2, 4, 3, 100),
    "growing, no memory": (2, 4, 0, 1, 4, 3, 100),
    "one query": (2, 1, 5, 3, 4, 5, 5),
    "one query, a longer memory": (1, 1, 6, 2, 3, 2, 4),
    "nothing but itself": (1, 1, 0, 1, 1, 0, 0),
    "window of 0": (2, 4, 3, 2, 4, 5, 0),
    "no persistent vectors": (2, 5, 2, 2, 4, 0, 3),
    "eight heads of width 1": (1, 3, 3, 8, 1, 4, 3),
}

LARGER: Shape = (2, 33, 20, 2, 16, 130, 20)  # with several of what a library's kernels take at a time


def make(
    shape: Shape,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    scales: tuple[float, float] = (3.0, 0.7),
    seed: int = 0,
    device: str = "cpu",
) -> CoreInputs:
    """Normal tensors, leaves of their own, that are the same on every device; any scales unless given."""
    B, T, memory, h, c, N, window = shape
    noise, S = torch.Generator().manual_seed(seed), T + memory
    sizes = [(B, T, h, c), (B, S, h, c), (B, S, h, c), (S, h, c), (h, c), (h, c), (N, h, c), (N, h, c)]
    tensors = [torch.randn(size, generator=noise, dtype=torch.float64) for size in sizes]
    leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
    return CoreInputs._make((*leaves, window, dropout, *scales))


def with_tensors(inputs: CoreInputs, tensors: list[Tensor]) -> CoreInputs:
    """Other tensors, the same numbers."""
    return CoreInputs._make((*tensors, *inputs.numbers))


def loop(inputs: CoreInputs, keep: Tensor | None = None) -> Tensor:
    """The slow reference; `keep` (B, h, T, S + N) multiplies the probabilities, as dropout does."""
    *others, pk, pv = inputs.tensors
    window = None if inputs.window >= inputs.k.shape[1] - 1 else inputs.window
    return reference_attend(*others, pk * inputs.key_scale, pv * inputs.value_scale, window, keep)


def upstream(inputs: CoreInputs) -> Tensor:
    """(B, T, h, c) the gradient of z that tests send back, the same for equal shapes and for every dtype."""
    noise = torch.Generator().manual_seed(1)
    dz = torch.randn(inputs.q.shape, generator=noise, dtype=torch.float64)
    return dz.to(inputs.q.device, inputs.q.dtype)


def results(core: Core, inputs: CoreInputs) -> dict[str, Tensor]:
    """z and the gradient of every tensor, under the tensor's name."""
    z = core(inputs)
    found = torch.autograd.grad(
        z, inputs.tensors, upstream(inputs), allow_unused=True, materialize_grads=True
    )
    for gradient, x in zip(found, inputs.tensors, strict=True):
        assert gradient.shape == x.shape
        assert gradient.dtype == x.dtype
        assert gradient.device == x.device
    return {"z": z.detach(), **dict(zip(NAMES, found, strict=True))}


def exact(inputs: CoreInputs) -> CoreInputs:
    """The same (rounded) numbers in float64 on the CPU, as leaves."""
    return with_tensors(inputs, [x.detach().cpu().double().requires_grad_() for x in inputs.tensors])


def error(core: Core, inputs: CoreInputs) -> float:
    """Greatest difference of z or a gradient from float64, relative to the greatest entry of any of them.

    One scale for all: a single gradient may be nothing but rounding.
    """
    wanted, found = results(attend_plain, exact(inputs)), results(core, inputs)
    assert found["z"].dtype == inputs.q.dtype
    scale = max(x.abs().max().item() for x in wanted.values() if x.numel())
    differences = [(found[name].cpu().double() - wanted[name]).abs() for name in wanted]
    return max(x.max().item() for x in differences if x.numel()) / scale
