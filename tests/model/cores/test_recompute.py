"""The recomputing core: its masks, what it keeps, its buffers, and devices without a device."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from support.cores import NAMES, RECOMPUTE, SHAPES, Shape, loop, make, results, upstream, with_tensors
from support.reference import assert_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from allattn.model.cores.choose import CORES as BY_NAME
from allattn.model.cores.choose import attend
from allattn.model.cores.inputs import CoreInputs
from allattn.model.cores.recompute import _Heads, attend_recompute
from allattn.model.cores.workspace import ELSEWHERE, ON_CPU, OnCpu, Workspace

WORKSPACES = {"recompute": ON_CPU, "elsewhere": ELSEWHERE}
BOTH = pytest.mark.parametrize("core", RECOMPUTE)
SHAPE = (2, 6, 6, 2, 8, 10, 6)


def drawn(workspace: Workspace, inputs: CoreInputs, seed: int) -> Tensor:
    """(B, h, T, S + N) multipliers of the probabilities, as the core draws them after this seed."""
    B, T, h, _ = inputs.q.shape
    S, N = inputs.k.shape[1], len(inputs.pk)
    heads = _Heads(inputs, workspace)
    torch.manual_seed(seed)
    masks = workspace.masks(heads.scores.numel(), heads.dropped, inputs.q.device)
    keep = torch.zeros(B, h, T, S + N, dtype=torch.float64)
    for head, bits in enumerate(islice(masks, h)):
        mask = heads.mask(bits).clone()
        keep[:, head, :, heads.first : S] = heads.sequence(mask)
        keep[:, head, :, S:] = mask[..., heads.span :]
    return keep / heads.keep


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("shape", "dropout"),
    [
        pytest.param("partial memory", 0.2, id="columns before the first key"),
        pytest.param("memory longer than the window", 0.9, id="keys that no query sees"),
        pytest.param("one query", 0.2, id="one query"),
    ],
)
@BOTH
def test_backward_uses_the_mask_of_the_forward_pass(core: str, shape: str, dropout: float) -> None:
    """Against the loop with the mask made visible; the seed of the backward pass is another."""
    inputs = make(SHAPES[shape], dropout=dropout)
    wanted = results(partial(loop, keep=drawn(WORKSPACES[core], inputs, 7)), inputs)

    def run(given: CoreInputs) -> Tensor:
        torch.manual_seed(7)
        z = RECOMPUTE[core](given)
        torch.manual_seed(8)
        return z

    found = results(run, inputs)
    for name in wanted:
        assert_close(found[name], wanted[name], 1e-10, name)


@pytest.mark.numeric
@pytest.mark.parametrize("dropout", [0.2, 0.5])
@BOTH
def test_mask_statistics(core: str, dropout: float) -> None:
    inputs = make((4, 32, 32, 4, 4, 500, 32), dropout=dropout)
    keep = drawn(WORKSPACES[core], inputs, 0)[:, :, :, 64:]
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


def test_a_cpus_masks_stay_those_of_earlier_versions() -> None:
    """SFC64 seeded from torch's default generator, a byte for a probability."""
    torch.manual_seed(11)
    first, second = islice(ON_CPU.masks(40, 51, torch.device("cpu")), 2)
    torch.manual_seed(11)
    bits = np.random.SFC64(int(torch.randint(2**63 - 1, ())))
    for mask in (first, second):
        drawn_bytes = np.array([bits.random_raw() for _ in range(5)], dtype="<u8").view(np.uint8)
        assert ON_CPU.unpacked(mask, 40).tolist() == (drawn_bytes >= 51).tolist()


@BOTH
def test_seeds(core: str) -> None:
    inputs = make(SHAPE, torch.float32, dropout=0.2)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(results(RECOMPUTE[core], inputs).values())

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    with torch.no_grad():  # the same mask without a graph, and another one at the next call
        z = [RECOMPUTE[core](inputs) for _ in range(2)]
    assert torch.equal(z[0], first[0])
    assert not torch.equal(*z)


@BOTH
def test_no_dropout_draws_nothing(core: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    RECOMPUTE[core](make((1, 3, 2, 1, 4, 2, 2)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("shape", "dropout"),
    [((2, 3, 2, 2, 3, 4, 2), 0.0), ((1, 3, 0, 1, 2, 0, 5), 0.3), ((1, 1, 3, 2, 2, 2, 1), 0.3)],
)
def test_gradcheck(shape: Shape, dropout: float) -> None:
    inputs = make(shape, dropout=dropout)

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_recompute(with_tensors(inputs, list(tensors)), ON_CPU)

    assert torch.autograd.gradcheck(run, inputs.tensors, fast_mode=False)


def test_only_needed_gradients() -> None:
    inputs = make((2, 4, 3, 2, 4, 5, 3), dropout=0.2)
    torch.manual_seed(0)
    wanted = results(RECOMPUTE["recompute"], inputs)
    for name in NAMES:
        single = [
            x.detach().requires_grad_(other == name) for other, x in zip(NAMES, inputs.tensors, strict=True)
        ]
        torch.manual_seed(0)
        RECOMPUTE["recompute"](with_tensors(inputs, single)).backward(upstream(inputs))
        for other, x in zip(NAMES, single, strict=True):
            assert torch.equal(x.grad, wanted[name]) if other == name else x.grad is None


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@BOTH
def test_only_inputs_and_bits_wait_for_the_backward_pass(core: str, dropout: float) -> None:
    """Not one tensor of the scores' size: B T h (W + T + N) bits, and the inputs themselves."""
    B, T, _, h, _, N, window = shape = (2, 8, 8, 3, 4, 40, 8)
    inputs = make(shape, torch.float32, dropout=dropout)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        z = RECOMPUTE[core](inputs)
    own = {x.untyped_storage().data_ptr() for x in inputs.tensors}
    assert own <= kept.keys()
    bits = h * B * T * (window + T + N) // 8 if dropout else 0
    assert sum(size for place, size in kept.items() if place not in own) == bits
    z.sum().backward()


def test_no_grad_builds_no_graph() -> None:
    inputs = make((1, 3, 2, 1, 4, 2, 2))
    with torch.no_grad():
        assert attend_recompute(inputs, ON_CPU).grad_fn is None
    with torch.inference_mode():
        attend_recompute(inputs, ON_CPU)


def test_a_call_leaves_nothing_to_later_ones() -> None:
    """A CPU's buffers stay: for calls of other sizes and dtypes, and after inference mode."""
    shapes = [(1, 3, 2, 1, 4, 2, 2), (2, 9, 4, 3, 4, 12, 5), (1, 2, 0, 2, 4, 3, 9), (2, 5, 9, 1, 4, 0, 3)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float64]
    calls = [make(shape, dtype, dropout=0.2) for shape in shapes for dtype in dtypes]

    def run(inputs: CoreInputs, workspace: Workspace) -> list[Tensor]:
        torch.manual_seed(0)
        return list(results(partial(attend_recompute, workspace=workspace), inputs).values())

    expected = [run(inputs, OnCpu()) for inputs in calls]
    workspace = OnCpu()
    with torch.inference_mode():
        attend_recompute(calls[4], workspace)
    for inputs, fresh in zip(calls * 2, expected * 2, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(run(inputs, workspace), fresh, strict=True))
        for buffer in vars(workspace.kept).values():
            buffer.fill_(torch.nan)


@BOTH
def test_checkpointed_and_moved_tensors_are_unpacked_once(core: str) -> None:
    inputs = make(SHAPE, dropout=0.2)

    def run(given: CoreInputs) -> Tensor:
        torch.manual_seed(0)
        return RECOMPUTE[core](given)

    def moved(given: CoreInputs) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(given)

    expected = results(run, inputs)
    for other in (partial(checkpoint, run, use_reentrant=False), moved):
        found = results(other, inputs)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_shape_inference_leaves_no_buffers_behind() -> None:
    inputs = with_tensors(
        make((1, 3, 2, 1, 4, 2, 2)), [x.detach() for x in make((1, 3, 2, 1, 4, 2, 2)).tensors]
    )
    expected = attend_recompute(inputs, ON_CPU)
    with FakeTensorMode() as mode:
        fake = with_tensors(inputs, [mode.from_tensor(x) for x in inputs.tensors])
        assert attend_recompute(fake, ON_CPU).shape == expected.shape
    assert torch.equal(attend_recompute(inputs, ON_CPU), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_of_another_device(dtype: torch.dtype) -> None:
    """Forward and backward on fake tensors of the device meta, which refuse every mixture with the CPU's.

    A torch that is built without CUDA slices no fake tensors of the device cuda and builds no graph of them.
    """
    given = make(SHAPE, dtype, dropout=0.2)
    B, T, _, h, _, N, window = SHAPE
    bits: list[Tensor] = []
    with FakeTensorMode():
        fake = [torch.empty(x.shape, dtype=dtype, device="meta").requires_grad_() for x in given.tensors]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: bits.append(x) or x, lambda x: x):
            z = BY_NAME["recompute"](with_tensors(given, fake))
        with pytest.raises(FakeTensorDeviceMismatchError):
            z + torch.zeros(1)
        gradients = torch.autograd.grad(z, fake, torch.empty_like(z))
    assert (z.shape, z.dtype, z.device.type) == (given.q.shape, dtype, "meta")
    packed = torch.Size([B * T * (window + T + N) // 8])
    assert [x.shape for x in bits if x.dtype == torch.uint8] == [packed] * h
    for name, gradient, x in zip(NAMES, gradients, fake, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device) == (x.shape, dtype, x.device), name


def test_what_is_not_finite_stays_with_its_head() -> None:
    """Columns without a key are shared by the heads: a window wider than the memory has some."""
    inputs = make((2, 4, 1, 3, 4, 5, 6))

    def gradient(dz: Tensor) -> Tensor:
        return torch.autograd.grad(attend_recompute(inputs, ON_CPU), inputs.q, dz)[0]

    dz = torch.ones_like(inputs.q)
    expected = gradient(dz)
    dz[:, :, 0] = torch.nan
    found = gradient(dz)
    assert found[:, :, 0].isnan().all()
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])


def test_threads_do_not_share_buffers() -> None:
    inputs = make((2, 40, 40, 4, 8, 64, 40))
    inputs = with_tensors(inputs, [x.detach() for x in inputs.tensors])
    alone = attend_recompute(inputs, ON_CPU)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: attend_recompute(inputs, ON_CPU), range(16)))
    assert all(torch.equal(z, alone) for z in together)


def test_bfloat16_keeps_onednn_enabled() -> None:
    """A product whose strides oneDNN refuses turns oneDNN off for the process, and bf16 40 times slower."""
    larger = [(2, 33, 20, 2, 16, 130, 20), (4, 64, 64, 2, 64, 256, 64), (4, 64, 0, 2, 64, 256, 64)]
    for shape in [*SHAPES.values(), *larger]:
        results(RECOMPUTE["recompute"], make(shape, torch.bfloat16, dropout=0.2))
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.gpu
def test_a_gpus_mask_serves_both_passes() -> None:
    """Against the loop with the mask made visible."""
    inputs = make(SHAPES["partial memory"], dropout=0.2, device="cuda")
    keep = drawn(ELSEWHERE, inputs, 7)
    on_cpu = make(SHAPES["partial memory"], dropout=0.2)

    def run(given: CoreInputs) -> Tensor:
        torch.manual_seed(7)
        return attend(given)

    wanted, found = results(partial(loop, keep=keep), on_cpu), results(run, inputs)
    for name in wanted:
        assert_close(found[name].cpu(), wanted[name], 1e-10, name)


@pytest.mark.gpu
def test_a_gpu_holds_inputs_outputs_and_bits_between_the_passes() -> None:
    inputs: Any = make((8, 128, 128, 8, 64, 1024, 128), torch.bfloat16, dropout=0.2, device="cuda")
    bits = 8 * 8 * 128 * (128 + 128 + 1024) // 8
    before = torch.cuda.memory_allocated()
    z = attend(inputs)
    held = torch.cuda.memory_allocated() - before
    assert held <= 1.05 * (bits + z.nbytes) + 2**20
