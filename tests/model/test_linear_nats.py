"""The cross-entropy of a linear map in one buffer, against torch's in separate steps."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.reference import rounding
from torch import Tensor

from allattn.model.linear_nats import linear_nats

pytestmark = pytest.mark.numeric

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
Inputs = tuple[Tensor, Tensor, list[Tensor]]  # x, columns, pieces


def inputs(rows: int, sizes: list[int], dtype: torch.dtype = torch.float64) -> Inputs:
    noise = torch.Generator().manual_seed(0)
    width = 5
    x = torch.randn(rows, width, generator=noise, dtype=dtype).requires_grad_()
    columns = torch.randint(sum(sizes), (rows,), generator=noise)
    pieces = []
    for size in sizes:
        pieces.append(torch.randn(size, width, generator=noise, dtype=dtype).requires_grad_())
        pieces.append(torch.randn(size, generator=noise, dtype=dtype).requires_grad_())
    return x, columns, pieces


def expected(x: Tensor, columns: Tensor, pieces: list[Tensor]) -> Tensor:
    logits = F.linear(x, torch.cat(pieces[::2]), torch.cat(pieces[1::2]))
    return F.cross_entropy(logits, columns, reduction="none")


@pytest.mark.parametrize("sizes", [[7], [4, 3], [1, 1, 6], [1]])
@pytest.mark.parametrize("rows", [1, 6, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_separate_steps(sizes: list[int], rows: int, dtype: torch.dtype) -> None:
    x, columns, pieces = inputs(rows, sizes, dtype)
    bound = 2 * rounding(dtype, 5 + sum(sizes) + rows)  # the width, the words and the rows are summed over
    found, wanted = linear_nats(x, columns, *pieces), expected(x, columns, pieces)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    weights = torch.randn(rows, dtype=dtype)  # rows count differently
    leaves = [x, *pieces]
    gradients = torch.autograd.grad(found, leaves, weights)
    for one, other in zip(gradients, torch.autograd.grad(wanted, leaves, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("alone", range(5))
def test_gradients_of_single_inputs(alone: int) -> None:
    x, columns, pieces = inputs(6, [4, 3])
    leaves = [x, *pieces]
    wanted = torch.autograd.grad(linear_nats(x, columns, *pieces).sum(), leaves)[alone]
    x, *pieces = (leaf.detach().requires_grad_(index == alone) for index, leaf in enumerate(leaves))
    linear_nats(x, columns, *pieces).sum().backward()
    found = [leaf.grad for leaf in (x, *pieces)]
    assert [gradient is not None for gradient in found] == [index == alone for index in range(5)]
    assert torch.equal(found[alone], wanted)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("rows", "sizes"), [(6, [4, 3]), (192, [20_000, 3]), (24, [160_000])], ids=str)
def test_float32_against_float64(rows: int, sizes: list[int], device: str) -> None:
    """At the paper's sizes too, where the buffer is worked on by several threads: as torch's separate steps.

    Those round as well, in other orders: three times their error, and a few roundings of a result.
    """
    exact_x, columns, exact_pieces = inputs(rows, sizes)
    exact_leaves = [exact_x, *exact_pieces]
    leaves = [x.detach().float().to(device).requires_grad_() for x in exact_leaves]
    exact_leaves = [x.detach().double().cpu().requires_grad_() for x in leaves]  # the rounded ones
    wanted = expected(exact_leaves[0], columns, exact_leaves[1:])
    found = linear_nats(leaves[0], columns.to(device), *leaves[1:])
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [wanted, *torch.autograd.grad(wanted, exact_leaves, weights)]
    there = weights.float().to(device)
    rounded = [found, *torch.autograd.grad(found, leaves, there)]
    separate = expected(leaves[0], columns.to(device), leaves[1:])
    steps = [separate, *torch.autograd.grad(separate, leaves, there)]

    def error(one: Tensor, other: Tensor) -> float:
        return ((one.double().cpu() - other).abs().max() / other.abs().max()).item()

    for one, step, other in zip(rounded, steps, exact, strict=True):
        assert error(one, other) < 3 * error(step, other) + rounding(torch.float32, 8)


def test_inputs_stay_as_they_are() -> None:
    x, columns, pieces = inputs(4, [3, 2])
    before = [leaf.detach().clone() for leaf in (x, columns, *pieces)]
    linear_nats(x, columns, *pieces).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(before, (x, columns, *pieces), strict=True))


@pytest.mark.parametrize("kept", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_second_backward_pass_raises_instead_of_lying(kept: Any) -> None:
    """The log-probabilities were overwritten by the gradient."""
    x, columns, pieces = inputs(4, [3, 2])
    with kept():
        nats = linear_nats(x, columns, *pieces).sum()
    nats.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        nats.backward()


@pytest.mark.parametrize("column", [-1, 5])
def test_a_column_that_is_not_there_raises(column: int) -> None:
    x, columns, pieces = inputs(4, [3, 2])
    columns[2] = column
    with pytest.raises((RuntimeError, IndexError)):
        linear_nats(x, columns, *pieces)


def test_backward_under_autocast_stays_in_the_inputs_precision() -> None:
    x, columns, pieces = inputs(6, [4, 3], torch.float32)
    leaves = [x, *pieces]
    wanted = torch.autograd.grad(linear_nats(x, columns, *pieces).sum(), leaves)
    nats = linear_nats(x, columns, *pieces).sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(nats, leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_nothing_is_kept_without_gradient() -> None:
    x, columns, pieces = inputs(4, [3, 2])
    with torch.no_grad():
        assert linear_nats(x, columns, *pieces).grad_fn is None
    with torch.inference_mode():
        torch.testing.assert_close(linear_nats(x, columns, *pieces), expected(x, columns, pieces))
