"""The fused CPU core and the plain core against the loop, gradients included; dropout by its statistics."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import reference_attend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from allattn.benchmark.yardstick import attend_yardstick
from allattn.model.cores import fused
from allattn.model.cores.core import attend, attend_plain
from allattn.model.cores.fused import _Heads, attend_fused

NAMES = ("q", "k", "v", "r", "u", "w", "pk", "pv")


def on_gpu(*inputs: Any, **settings: float) -> Tensor:
    """The core that a GPU gets, from and to the CPU."""
    there = (x.cuda() if isinstance(x, Tensor) else x for x in inputs)
    return attend(*there, **settings).cpu()


GPU = pytest.param(
    on_gpu, id="gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
)
FUSED, PLAIN = pytest.param(attend_fused, id="fused"), pytest.param(attend_plain, id="plain")
YARDSTICK = pytest.param(attend_yardstick, id="yardstick")
CORES = pytest.mark.parametrize("core", [FUSED, PLAIN, GPU])
Shape = tuple[int, int, int, int, int, int, int]  # B, T, memory, h, c, N, window
Attend = Callable[..., Tensor]  # `attend` or what stands in for it


def make(
    shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 1.0
) -> tuple[Tensor, ...]:
    B, T, memory, h, c, N, _ = shape
    g = torch.Generator().manual_seed(seed)
    S = T + memory

    def normal(*size: int) -> Tensor:
        x = torch.randn(*size, generator=g, dtype=torch.float64)
        return (x * spread).to(dtype).requires_grad_()

    return (normal(B, T, h, c), normal(B, S, h, c), normal(B, S, h, c), normal(S, h, c), normal(h, c),
            normal(h, c), normal(N, h, c), normal(N, h, c))  # fmt: skip


def gradients(z: Tensor, inputs: Any, dz: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(z, inputs, dz.to(z.dtype), allow_unused=True, materialize_grads=True)


def error(x: Tensor, reference: Tensor) -> float:
    """Greatest difference relative to the greatest magnitude of the reference."""
    if not x.numel():
        return 0.0
    return ((x.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-12)).item()


def shapes() -> list[Shape]:
    pick = random.Random(0)
    found = []
    for case in range(48):
        T = 1 if case % 6 == 0 else pick.randint(1, 9)
        window = pick.randint(0, 9)
        memory = (0, window, pick.randint(0, window), window + pick.randint(1, 4))[case % 4]
        found.append((pick.randint(1, 3), T, memory, case % 8 + 1, pick.choice([1, 3, 4, 8]),
                      pick.choice([0, 1, 5, 11]), window))  # fmt: skip
    return [*found, (2, 4, 0, 2, 4, 3, 100), (2, 5, 2, 2, 4, 0, 100), (1, 1, 0, 1, 1, 0, 0)]


SHAPES = shapes()


def scales(shape: Shape) -> tuple[float, float]:
    """key_scale sqrt(c) and value_scale sqrt(N), as a layer has them."""
    c, N = shape[4:6]
    return c**0.5, N**0.5


def exactly(inputs: Any, shape: Shape, keep: Tensor | None = None) -> Tensor:
    """The loop, with scaled persistent vectors."""
    *others, pk, pv = inputs
    key_scale, value_scale = scales(shape)
    return reference_attend(*others, pk * key_scale, pv * value_scale, shape[-1], keep)


def worst(core: Attend, shape: Shape, dtype: torch.dtype, spread: float = 1.0) -> list[float]:
    """Errors of z and every gradient against the float64 loop on the same (rounded) inputs."""
    inputs = make(shape, dtype, spread=spread)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    reference = exactly(exact, shape)
    z = core(*inputs, shape[-1], 0.0, *scales(shape))
    assert z.dtype == dtype
    dz = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )
    pairs = [(z, reference), *zip(gradients(z, inputs, dz), gradients(reference, exact, dz), strict=True)]
    for (x, y), like in zip(pairs[1:], inputs, strict=True):
        assert x.shape == like.shape == y.shape
        assert x.dtype == dtype
    # one scale for all position and key gradients: a single tensor's may be rounding noise only
    scale = max(y.abs().max().item() for _, y in pairs if y.numel())
    return [((x.double() - y).abs().max() / scale).item() if x.numel() else 0.0 for x, y in pairs]


@CORES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64(core: Attend, shape: Shape) -> None:
    assert max(worst(core, shape, torch.float64)) < 1e-10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_each_tensor_on_its_own_scale(shape: Shape) -> None:
    inputs = make(shape)
    reference, z = exactly(inputs, shape), attend_fused(*inputs, shape[-1], 0.0, *scales(shape))
    dz = torch.randn_like(reference)
    assert error(z, reference) < 1e-10
    for name, x, y in zip(NAMES, gradients(z, inputs, dz), gradients(reference, inputs, dz), strict=True):
        assert (x - y).abs().max().item() < 1e-10 * max(1e-3, y.abs().max().item()) if x.numel() else True, (
            name
        )


@pytest.mark.parametrize("core", [FUSED, PLAIN, YARDSTICK, GPU])
@pytest.mark.parametrize("shape", SHAPES[::7], ids=str)
def test_any_scales_of_persistent_vectors(core: Attend, shape: Shape) -> None:
    inputs = make(shape)
    *others, pk, pv = inputs
    scaled = reference_attend(*others, pk * 3.0, pv * 0.7, shape[-1])
    z = core(*inputs, shape[-1], 0.0, key_scale=3.0, value_scale=0.7)
    dz = torch.randn_like(z)
    assert error(z, scaled) < 1e-10
    for x, y in zip(gradients(z, inputs, dz), gradients(scaled, inputs, dz), strict=True):
        assert error(x, y) < 1e-10


@CORES
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_float32(core: Attend, shape: Shape) -> None:
    assert max(worst(core, shape, torch.float32)) < 1e-5


@CORES
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_bfloat16(core: Attend, shape: Shape) -> None:
    assert max(worst(core, shape, torch.bfloat16)) < 0.03


@pytest.mark.parametrize("shape", [(2, 33, 20, 2, 16, 130, 20), (2, 40, 40, 1, 64, 256, 40)], ids=str)
def test_larger_shapes_against_plain(shape: Shape) -> None:
    inputs = make(shape)
    z, plain = attend_fused(*inputs, shape[-1], 0.0), attend_plain(*inputs, shape[-1], 0.0)
    dz = torch.randn_like(z)
    assert error(z, plain) < 1e-12
    for x, y in zip(gradients(z, inputs, dz), gradients(plain, inputs, dz), strict=True):
        assert error(x, y) < 1e-10


def drawn(shape: Shape, dropout: float, seed: int) -> Tensor:
    """(B, h, T, S + N) multipliers of the probabilities, drawn as attend_fused draws them."""
    inputs = make(shape)
    B, T, memory, h, _, N, window = shape
    torch.manual_seed(seed)
    dropped = round(256 * dropout)
    heads = _Heads(inputs, window, dropped, 1.0, 1.0)
    bits = np.random.SFC64(int(torch.randint(2**63 - 1, ())))
    keep = torch.zeros(B, h, T, T + memory + N, dtype=torch.float64)
    for head in range(h):
        mask = heads.mask(heads.draw(bits)).clone()
        keep[:, head, :, heads.first : T + memory] = heads.sequence(mask)
        keep[:, head, :, T + memory :] = mask[..., heads.span :]
    return keep / (1 - dropped / 256)


@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 3, 4, 6, 7), (2, 5, 0, 2, 4, 0, 9), (1, 4, 6, 2, 3, 5, 4), (1, 1, 0, 1, 4, 7, 2)]
)
@pytest.mark.parametrize("dropout", [0.2, 0.9])
def test_backward_uses_the_mask_of_the_forward_pass(shape: Shape, dropout: float) -> None:
    inputs = make(shape)
    keep = drawn(shape, dropout, 7)
    reference = exactly(inputs, shape, keep)
    torch.manual_seed(7)
    z = attend_fused(*inputs, shape[-1], dropout, *scales(shape))
    torch.manual_seed(8)  # the backward pass must not depend on the global generator
    dz = torch.randn_like(z)
    assert error(z, reference) < 1e-10
    for x, y in zip(gradients(z, inputs, dz), gradients(reference, inputs, dz), strict=True):
        assert not x.numel() or (x - y).abs().max().item() < 1e-10


@pytest.mark.parametrize("dropout", [0.1, 0.2, 0.5])
def test_dropout_statistics(dropout: float) -> None:
    keep = drawn((4, 32, 32, 4, 4, 500, 32), dropout, 0)[:, :, :, 64:]
    exact = 1 - round(256 * dropout) / 256
    share = (keep > 0).double()
    n = share.numel()
    assert abs(share.mean().item() - exact) < 4 * (exact * (1 - exact) / n) ** 0.5
    assert abs(keep.mean().item() - 1) < 4 * ((1 - exact) / exact / n) ** 0.5
    # neighbours, rows, heads and batch rows are uncorrelated; no column is special (all 8 bytes of a word)
    neighbours = [
        (share[..., 1:], share[..., :-1]),
        (share[:, :, 1:], share[:, :, :-1]),
        (share[:, 1:], share[:, :-1]),
        (share[1:], share[:-1]),
        (share[..., 8:], share[..., :-8]),
    ]
    for a, b in neighbours:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 5 / n**0.5
    columns = share.flatten(0, 2)
    deviation = (columns.mean(0) - exact) / (exact * (1 - exact) / columns.shape[0]) ** 0.5
    assert deviation.abs().max().item() < 5


@CORES
def test_output_is_unbiased(core: Attend) -> None:
    shape = (1, 3, 2, 2, 4, 6, 2)
    inputs = [x.detach() for x in make(shape)]
    torch.manual_seed(0)
    draws = torch.stack([core(*inputs, shape[-1], 0.3) for _ in range(4000)])
    off = (draws.mean(0) - core(*inputs, shape[-1], 0.0)) / (draws.std(0) / 4000**0.5)
    assert draws.std(0).min() > 0
    assert off.abs().max().item() < 5


@CORES
def test_share_of_dropped_probabilities(core: Attend) -> None:
    """With values 1 and equal scores every output is the share kept, over what is kept on average."""
    B, T, h, N = 4, 16, 2, 500
    q, k, v = (torch.zeros(B, T, h, 1, dtype=torch.float64) for _ in range(3))
    bias, r = torch.zeros(h, 1, dtype=torch.float64), torch.zeros(T, h, 1, dtype=torch.float64)
    pk, pv = torch.zeros(N, h, 1, dtype=torch.float64), torch.ones(N, h, 1, dtype=torch.float64)
    torch.manual_seed(0)
    z = core(q, k, v + 1, r, bias, bias, pk, pv, T, 0.2)
    seen = N + torch.arange(1, T + 1).view(1, T, 1, 1)
    keep = 1 - (51 / 256 if core is attend_fused else 0.2)
    kept = z * keep * seen
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-6)  # whole numbers of probabilities
    total = float(seen.sum()) * B * h
    assert abs(float(kept.sum()) / total - keep) < 4 * (keep * (1 - keep) / total) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seeds(dtype: torch.dtype) -> None:
    shape = (2, 6, 6, 2, 8, 10, 6)
    inputs = make(shape, dtype)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        z = attend_fused(*inputs, shape[-1], 0.2)
        return [z, *gradients(z, inputs, torch.ones_like(z))]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    z = [attend_fused(*inputs, shape[-1], 0.2) for _ in range(2)]
    assert not torch.equal(*z)
    with torch.no_grad():  # the same mask without a graph
        torch.manual_seed(1)
        assert torch.equal(attend_fused(*inputs, shape[-1], 0.2), first[0])


def test_no_dropout_draws_nothing() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    attend_fused(*make((1, 3, 2, 1, 4, 2, 2)), 2, 0.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(2, 3, 2, 2, 3, 4, 2), (1, 3, 0, 1, 2, 0, 5), (1, 1, 3, 2, 2, 2, 1)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(shape: Shape, dropout: float) -> None:
    def run(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_fused(*inputs, shape[-1], dropout, *scales(shape))

    assert torch.autograd.gradcheck(run, make(shape), fast_mode=False)


@pytest.mark.parametrize("alone", range(8), ids=NAMES)
def test_only_needed_gradients(alone: int) -> None:
    shape = (2, 4, 3, 2, 4, 5, 3)
    inputs = make(shape)
    torch.manual_seed(0)
    z = attend_fused(*inputs, 3, 0.2)
    dz = torch.randn(z.shape, dtype=z.dtype)
    expected = torch.autograd.grad(z, inputs[alone], dz)[0]
    single = [x.detach().requires_grad_(i == alone) for i, x in enumerate(inputs)]
    torch.manual_seed(0)
    attend_fused(*single, 3, 0.2).backward(dz)
    assert torch.equal(single[alone].grad, expected)
    assert all(x.grad is None for i, x in enumerate(single) if i != alone)


def test_strided_inputs_and_inputs_unchanged() -> None:
    B, T, h, c = 2, 5, 2, 4
    qkv = torch.randn(B, T, 3 * h * c, dtype=torch.float64)
    q, k, v = (x.view(B, T, h, c) for x in qkv.chunk(3, -1))
    rest = make((B, T, 0, h, c, 3, T))[3:]
    copy = qkv.clone()
    z = attend_fused(q, k, v, *rest, T, 0.0)
    assert torch.equal(qkv, copy)
    assert error(z, reference_attend(q, k, v, *rest, T)) < 1e-10


def test_autocast_with_float32_parameters() -> None:
    shape = (2, 6, 6, 2, 8, 10, 6)
    inputs = make(shape, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = [x.bfloat16() if i < 4 else x for i, x in enumerate(inputs)]
        z = attend_fused(*mixed, 6, 0.0)
        z.float().sum().backward()
    assert z.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 for x in inputs)


def test_no_grad_builds_no_graph() -> None:
    inputs = make((1, 3, 2, 1, 4, 2, 2))
    with torch.no_grad():
        assert attend_fused(*inputs, 2, 0.0).grad_fn is None
    with torch.inference_mode():
        attend_fused(*inputs, 2, 0.0)


def test_a_call_leaves_nothing_to_later_ones() -> None:
    """Its buffers stay: for calls of other sizes and dtypes, and after inference mode."""
    shapes = [(1, 3, 2, 1, 4, 2, 2), (2, 9, 4, 3, 4, 12, 5), (1, 2, 0, 2, 4, 3, 9), (2, 5, 9, 1, 4, 0, 3)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float64]
    calls = [(make(shape, dtype), shape[-1]) for shape in shapes for dtype in dtypes]

    def run(inputs: list[Tensor], window: int) -> list[Tensor]:
        torch.manual_seed(0)
        z = attend_fused(*inputs, window, 0.2)
        return [z.detach(), *gradients(z, inputs, torch.ones_like(z))]

    expected = []
    for inputs, window in calls:
        fused._kept = threading.local()
        expected.append(run(inputs, window))
    fused._kept = threading.local()
    with torch.inference_mode():
        attend_fused(*calls[4][0], calls[4][1], 0.2)
    for (inputs, window), fresh in zip(calls * 2, expected * 2, strict=True):
        for x, y in zip(run(inputs, window), fresh, strict=True):
            assert torch.equal(x, y)
        for buffer in vars(fused._kept).values():
            buffer.fill_(torch.nan)


def test_checkpointed_and_moved_tensors_are_unpacked_once() -> None:
    shape = (2, 6, 6, 2, 8, 10, 6)
    inputs = make(shape)

    def run() -> Tensor:
        torch.manual_seed(0)
        return attend_fused(*inputs, shape[-1], 0.2)

    dz = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    expected = gradients(run(), inputs, dz)
    with torch.autograd.graph.save_on_cpu():
        moved = run()
    for z in (checkpoint(run, use_reentrant=False), moved):
        for x, y in zip(gradients(z, inputs, dz), expected, strict=True):
            assert torch.equal(x, y)


def test_shape_inference_leaves_no_buffers_behind() -> None:
    inputs = [x.detach() for x in make((1, 3, 2, 1, 4, 2, 2))]
    expected = attend_fused(*inputs, 2, 0.0)
    with FakeTensorMode() as mode:
        assert attend_fused(*(mode.from_tensor(x) for x in inputs), 2, 0.0).shape == expected.shape
    assert torch.equal(attend_fused(*inputs, 2, 0.0), expected)


def test_what_is_not_finite_stays_with_its_head() -> None:
    """Columns without a key are shared by the heads: a window wider than the memory has some."""
    shape = (2, 4, 1, 3, 4, 5, 6)
    inputs = make(shape)
    z = attend_fused(*inputs, shape[-1], 0.0)
    dz = torch.ones_like(z)
    expected = gradients(z, inputs, dz)[0]
    dz[:, :, 0] = torch.nan
    found = gradients(attend_fused(*inputs, shape[-1], 0.0), inputs, dz)[0]
    assert found[:, :, 0].isnan().all()
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])


def test_threads_do_not_share_buffers() -> None:
    shape = (2, 40, 40, 4, 8, 64, 40)
    inputs = [x.detach() for x in make(shape)]
    alone = attend_fused(*inputs, shape[-1], 0.0)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: attend_fused(*inputs, shape[-1], 0.0), range(16)))
    assert all(torch.equal(z, alone) for z in together)


def test_bfloat16_keeps_onednn_enabled() -> None:
    """A product whose strides oneDNN refuses turns oneDNN off for the process, and bf16 40 times slower."""
    for shape in [
        *SHAPES[::5],
        (2, 33, 20, 2, 16, 130, 20),
        (4, 64, 64, 2, 64, 256, 64),
        (4, 64, 0, 2, 64, 256, 64),
    ]:
        inputs = make(shape, torch.bfloat16)
        z = attend_fused(*inputs, shape[-1], 0.2, *scales(shape))
        gradients(z, inputs, torch.ones_like(z))
    assert torch._C._get_mkldnn_enabled()
