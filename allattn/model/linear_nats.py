"""Cross-entropy of a linear map in one buffer: the logits become log-probabilities, then the gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allattn.devices import no_autocast


def linear_nats(x: Tensor, columns: Tensor, *pieces: Tensor) -> Tensor:
    """-log softmax([W_1; W_2; ...] x + [b_1; b_2; ...]) at each row's column.

    The pieces are not joined, and nothing of size R * C is kept but the log-probabilities, which the backward
    pass overwrites.

    Args:
        x: (R, d) inputs.
        columns: (R,) int64 in 0..C-1, C = sum of the pieces' C_i.
        pieces: W_1 (C_1, d), b_1 (C_1,), W_2, b_2, ...

    Returns:
        (R,) nats, in the dtype of `x`.

    Raises:
        RuntimeError: a column is outside 0..C-1; in the backward pass, when it is a second one.
    """
    result: Tensor = _LinearNats.apply(x, columns, *pieces)
    return result


class _LinearNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, *pieces: Tensor) -> Tensor:
        weights, biases = pieces[::2], pieces[1::2]
        logits = x.new_empty(len(x), sum(len(bias) for bias in biases))
        for part, weight, bias in zip(_split(logits, weights), weights, biases, strict=True):
            torch.addmm(bias, x, weight.T, out=part)
        torch.log_softmax(logits, 1, out=logits)
        ctx.save_for_backward(x, columns, logits, *weights)
        ctx.spent = False
        return -logits.gather(1, columns.unsqueeze(1)).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("a second backward pass: the first one overwrote the log-probabilities")
        ctx.spent = True
        x, columns, logits, *weights = ctx.saved_tensors
        for_x, _, *for_pieces = ctx.needs_input_grad
        dx: Tensor | None = None
        of_pieces: list[Tensor | None] = []
        with no_autocast(grad.device):
            gradient = logits.exp_()  # of the logits: probabilities, less 1 at the column
            gradient.scatter_add_(1, columns.unsqueeze(1), -gradient.new_ones(len(x), 1))
            gradient *= grad.unsqueeze(1)
            for index, (part, weight) in enumerate(zip(_split(gradient, weights), weights, strict=True)):
                if for_x:
                    dx = part @ weight if dx is None else dx + part @ weight
                of_pieces.append(part.T @ x if for_pieces[2 * index] else None)
                of_pieces.append(part.sum(0) if for_pieces[2 * index + 1] else None)
        return dx, None, *of_pieces


def _split(joined: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(R, C) -> the pieces' (R, C_i), views."""
    return joined.split([len(weight) for weight in weights], dim=1)
