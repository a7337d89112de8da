"""The attention core that keeps no probabilities: one autograd function, head by head, over one score buffer.

The arithmetic is that of the plain core; what differs is what is kept and moved.

- One buffer of (B * T, W + T + N) scores serves all heads; softmax, dropout and both groups of keys share it.
- Column e of the sequence part is position M' - W + e, so query i sees columns i..i+W and no others. That
  band is a strided view (row stride + 1): the position products, for W + 1 distances only, are copied into
  place without a shift or a mask; the rest of the sequence part is -inf before it is copied.
- Between forward and backward stay the inputs and the bits of the dropout masks: scores and probabilities are
  computed again.
- How masks are drawn and where buffers come from is the workspace's.

    B rows, T queries, S keys in the sequence (memory first, M' = S - T), h heads present, c head width,
    N persistent vectors, W = min(window, S - 1)
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allattn.devices import no_autocast
from allattn.model.cores.inputs import CoreInputs
from allattn.model.cores.workspace import Workspace


def _by_head(x: Tensor) -> Tensor:
    """(..., h, c) -> (h, ..., c), contiguous."""
    return x.movedim(-2, 0).contiguous()


class _Heads:
    """The inputs of one call by head, and the buffers that all heads share."""

    def __init__(self, inputs: CoreInputs, workspace: Workspace) -> None:
        q, k, v, r, u, w, pk, pv, window, dropout, key_scale, value_scale = inputs
        batch, queries, self.count, width = q.shape
        keys = k.shape[1]
        window = min(window, keys - 1)
        self.scale = 1 / math.sqrt(width)
        self.memory = keys - queries
        self.first = max(self.memory - window, 0)  # keys before this one are seen by no query
        self.pad = max(window - self.memory, 0)  # columns before the first key
        self.span = window + queries  # columns of the sequence part

        q_heads = _by_head(q).flatten(1, 2)  # (h, B*T, c), as all queries here
        self.qu = (q_heads + u.unsqueeze(1)) * self.scale
        self.qw = (q_heads + w.unsqueeze(1)) * self.scale
        self.qp = q_heads * (self.scale * key_scale)  # for the persistent keys
        self.key_scale, self.value_scale = key_scale, value_scale
        self.k, self.v = _by_head(k[:, self.first :]), _by_head(v[:, self.first :])  # (h, B, S - first, c)
        self.r = _by_head(r[: window + 1].flip(0))  # (h, W+1, c), distance W first
        self.pk, self.pv = pk.unbind(1), pv.unbind(1)  # (N, c) each

        self.shape = (batch, queries, self.span + len(pk))
        self.workspace = workspace
        self.scores = workspace.buffer("scores", self.shape, self.qp)
        self.dropped = min(round(256 * dropout), 255)  # of the 256 values of a byte
        self.keep = 1 - self.dropped / 256

    def band(self, scores: Tensor) -> Tensor:
        """(B, T, W+1) view of the visible columns of a score buffer, distance W first."""
        batch, queries, columns = self.shape
        size = (batch, queries, self.span - queries + 1)
        return scores.as_strided(size, (queries * columns, columns + 1, 1))

    def sequence(self, scores: Tensor) -> Tensor:
        """(B, T, S - first) view of the columns of the keys `self.k`."""
        return scores[..., self.pad : self.span]

    def persistent(self, scores: Tensor) -> Tensor:
        """(B*T, N) view of the columns of the persistent keys."""
        return scores.flatten(0, 1)[:, self.span :]

    def rows(self, x: Tensor) -> Tensor:
        """(B*T, c) -> (B, T, c)."""
        return x.view(*self.shape[:2], -1)

    def probabilities(self, head: int) -> Tensor:
        """(B, T, W+T+N) softmax of one head's scores, before dropout, in the shared buffer."""
        scores = self.scores
        scores[..., : self.span].fill_(-math.inf)
        band = self.band(scores)
        band.copy_(self.rows(self.qw[head] @ self.r[head].T))
        scores[..., : self.pad].fill_(-math.inf)
        self.sequence(scores).baddbmm_(self.rows(self.qu[head]), self.k[head].mT)
        torch.mm(self.qp[head], self.pk[head].T, out=self.persistent(scores))
        return torch.softmax(scores, -1, out=scores)

    def mask(self, bits: Tensor) -> Tensor:
        """(B, T, W+T+N) in the scores' dtype, 1 where a probability is kept, else 0."""
        kept = self.workspace.unpacked(bits, self.scores.numel())
        return self.workspace.buffer("mask", self.shape, self.scores).copy_(kept.view(self.shape))

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """z (B, T, h, c) and the bits of the heads' dropout masks, none without dropout."""
        batch, queries, _ = self.shape
        z = self.qp.new_empty(batch, queries, self.count, self.qp.shape[-1])
        masks = []
        draws = self.workspace.masks(self.scores.numel(), self.dropped, self.scores.device)
        for head in range(self.count):
            scores = self.probabilities(head)
            if self.dropped:
                masks.append(next(draws))
                scores.mul_(self.mask(masks[-1]))
            out = torch.bmm(self.sequence(scores), self.v[head])
            out.flatten(0, 1).addmm_(self.persistent(scores), self.pv[head], alpha=self.value_scale)
            z[:, :, head] = out / self.keep
        return z, masks

    def backward(
        self, grad: Tensor, masks: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs from that of z, None where not `needed`."""
        batch, queries, _ = self.shape
        dz_heads = _by_head(grad).flatten(1, 2) / self.keep  # (h, B*T, c)
        width, seen, keys = self.qp.shape[-1], self.r.shape[1], self.memory + queries
        empty = self.qp.new_empty
        dq = empty(batch, queries, self.count, width)
        dk, dv = (empty(batch, keys, self.count, width) for _ in range(2))
        dr = empty(keys, self.count, width)
        du, dw = (empty(self.count, width) for _ in range(2))
        dpk, dpv = (empty(len(self.pk[0]), self.count, width) for _ in range(2))
        for x in (dk[:, : self.first], dv[:, : self.first], dr[seen:]):  # of keys and distances not seen
            x.zero_()
        work = self.workspace.buffer("work", self.shape, self.scores)

        for head in range(self.count):
            scores, dz = self.probabilities(head), dz_heads[head]
            work[..., : self.pad].zero_()
            dz_persistent = dz * self.value_scale
            dropped = scores
            if self.dropped:
                mask = self.mask(masks[head])
                dropped = torch.mul(scores, mask, out=work)
            if needed[2]:
                dv[:, self.first :, head] = torch.bmm(self.rows(dz).mT, self.sequence(dropped)).mT
            if needed[7]:
                dpv[:, head] = (dz_persistent.T @ self.persistent(dropped)).T
            if not (any(needed[:2]) or any(needed[3:7])):
                continue
            # gradient of the probabilities, then of the scores, in `work`; columns without a key stay 0
            torch.bmm(self.rows(dz), self.v[head].mT, out=self.sequence(work))
            torch.mm(dz_persistent, self.pv[head].T, out=self.persistent(work))
            if self.dropped:
                work.mul_(mask)
            torch.ops.aten._softmax_backward_data.out(work, scores, -1, work.dtype, grad_input=work)
            sequence, persistent = self.sequence(work), self.persistent(work)
            band = self.band(work).flatten(0, 1)  # (B*T, W+1), a copy
            if needed[0] or needed[4] or needed[5]:
                content = torch.bmm(sequence, self.k[head]).flatten(0, 1)
                position = band @ self.r[head]
                du[head], dw[head] = content.sum(0), position.sum(0)
                total = content.add_(position).addmm_(persistent, self.pk[head], alpha=self.key_scale)
                dq[:, :, head] = self.rows(total)
            if needed[1]:
                dk[:, self.first :, head] = torch.bmm(self.rows(self.qu[head]).mT, sequence).mT
            if needed[3]:
                dr[:seen, head] = (self.qw[head].T @ band).T.flip(0)
            if needed[6]:
                dpk[:, head] = (self.qp[head].T @ persistent).T
        for x in (dq, du, dw):
            x.mul_(self.scale)
        grads = (dq, dk, dv, dr, du, dw, dpk, dpv)
        return tuple(x if need else None for x, need in zip(grads, needed, strict=True))


class _Attend(torch.autograd.Function):
    """The core with a backward pass; keeps the inputs and the bits of the dropout masks."""

    @staticmethod
    def forward(
        ctx: Any, workspace: Workspace, numbers: tuple[int, float, float, float], *tensors: Tensor
    ) -> Tensor:
        z, masks = _Heads(CoreInputs._make((*tensors, *numbers)), workspace).forward()
        ctx.save_for_backward(*tensors, *masks)
        ctx.workspace, ctx.numbers = workspace, numbers
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, masks = saved[:8], saved[8:]
        with no_autocast(grad.device):
            heads = _Heads(CoreInputs._make((*tensors, *ctx.numbers)), ctx.workspace)
            return None, None, *heads.backward(grad, masks, ctx.needs_input_grad[2:])


def attend_recompute(inputs: CoreInputs, workspace: Workspace) -> Tensor:
    """A core in the dtype of `q` on any device; see `Core`.

    The dropout probability is rounded to a multiple of 1/256 below 1, and what is kept is divided by the
    exact probability of keeping it.
    """
    dtype, device = inputs.q.dtype, inputs.q.device
    with no_autocast(device):
        tensors = tuple(x.to(dtype) for x in inputs.tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            result: Tensor = _Attend.apply(workspace, inputs.numbers, *tensors)
            return result
        z, _ = _Heads(CoreInputs._make((*tensors, *inputs.numbers)), workspace).forward()
        return z
