"""What is asked of a model whose heads are scored, zeroed or gated, whoever wrote it.

    B sequences, T tokens, h query heads present, g key/value heads (h / g query heads share one), dv width of
    a head's value, d width of the residual stream, M' memory, N persistent vectors

Four objects (Elhage et al., *A Mathematical Framework for Transformer Circuits*): attention weights A; values
V; pre-projection head outputs Z = A V; contributions Z WO^(h), whose sum over the heads and a bias is the
module's output Y.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, padded to one length."""

    ids: Tensor  # (B, T) int64, on the CPU
    targets: Tensor  # (B, T) int64, the next token of each position; negative = not scored
    real: Tensor  # (B, T) bool, False at padding, on either side; a row may be padding alone


@dataclass(frozen=True)
class Attention:
    """What the heads of one layer looked at.

    Keys lie in the order memory, sequence, persistent vectors.
    """

    weights: Tensor  # (B, h, T, M' + T + N), rows sum to 1; 0 at padding
    values: Tensor  # (B, M' + T + N, g, dv)
    memory: int  # M'
    persistent: int  # N


class HeadLayer(Protocol):
    """The heads of one layer, as they are now."""

    @property
    def heads(self) -> int:
        """h."""

    @property
    def groups(self) -> int:
        """g."""

    def output_blocks(self) -> Tensor:
        """(h, dv, d): WO^(h) of every head, times the layer's s_g where it has one."""

    def output_bias(self) -> Tensor | None:
        """(d,), or None where Y has no bias."""


class Visitor:
    """Looks at every layer of a forward pass; a subclass overrides what it wants to see.

    Attributes:
        wants_attention: whether `attention` is to be called; some models then compute in a slower way.
    """

    wants_attention = False

    def begins(self, real: Tensor) -> None:
        """A forward pass begins; `real` (B, T) bool, on the model's device, is False at padding."""

    def z(self, layer: int, z: Tensor) -> Tensor | None:
        """Head outputs Z (B, T, h, dv), without s_g; what is returned takes their place."""

    def attention(self, layer: int, attention: Attention) -> None:
        """Called before `z` of the same layer."""

    def y(self, layer: int, y: Tensor) -> Tensor | None:
        """The module's output Y (B, T, d), bias included, after `z`; what is returned takes its place."""

    def stream(self, layer: int, x: Tensor) -> None:
        """The residual stream (B, T, d) as it leaves the layer, feed-forward included."""


class HeadModel(Protocol):
    """A causal language model whose heads can be watched."""

    @property
    def layers(self) -> Sequence[HeadLayer]:
        """One per layer of the model, in order; a layer without heads has `heads` 0 and is never visited."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def watch(self, visitor: Visitor) -> AbstractContextManager[None]:
        """Inside, `visitor` sees every forward pass; after it, or an error, nothing of it is left.

        Several may watch, each what those before it have changed.
        """

    def nats(self, batch: Batch, memory: Any = None) -> tuple[Tensor, Any]:
        """(B, T) nats of the targets, 0 where not scored, and what goes in as memory with the next batch.

        Memory None = none before the sequences; models without a memory give None. Gradients flow through
        what a visitor returns.
        """
