"""Our models, of both families, dense or cut, as models whose heads are watched.

B sequences, T tokens, M' memory, N persistent vectors, h heads present, c head width, d width
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allattn.devices import no_autocast, to_device
from allattn.heads.watched import Attention, Batch, Visitor
from allattn.model.attention import AllAttention
from allattn.model.cores.inputs import Core, CoreInputs
from allattn.model.cores.plain import attention_weights
from allattn.model.language_model import AllAttentionLM, Memory
from allattn.model.words import words_of


class OwnLayer:
    """The heads of one layer; a `HeadLayer`."""

    def __init__(self, layer: AllAttention) -> None:
        self._layer = layer

    @property
    def heads(self) -> int:
        """h."""
        return len(self._layer.heads_kept)

    @property
    def groups(self) -> int:
        """As many: every head has its own keys and values."""
        return self.heads

    def output_blocks(self) -> Tensor:
        """(h, c, d): WO^(h) times s_g."""
        blocks = self._layer.output.weight.T.unflatten(0, (self.heads, self._layer.head_width))
        return blocks * self._layer.scale

    def output_bias(self) -> Tensor:
        """(d,)."""
        return self._layer.bias


class OwnModel:
    """An `AllAttentionLM` as a `HeadModel`.

    Z is without s_g. Y is what the layer adds to its input before the feed-forward sublayer.
    """

    def __init__(self, model: AllAttentionLM) -> None:
        self.model = model
        self.layers = [OwnLayer(layer) for layer in model.stack]
        self._real: Tensor | None = None  # (B, T) of the pass that runs

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @contextmanager
    def watch(self, visitor: Visitor) -> Iterator[None]:
        """Inside, the model is in evaluation mode and `visitor` sees its forward passes; see `HeadModel`.

        Attention weights are computed beside the core's own work, which gives the same Z as without.
        """
        with ExitStack() as stack:
            stack.callback(self.model.train, self.model.training)
            self.model.eval()
            begins = self.model.stack[0].register_forward_pre_hook(partial(self._begins, visitor))
            stack.callback(begins.remove)
            layers = [(index, layer) for index, layer in enumerate(self.model.stack) if layer.heads_kept]
            for index, layer in layers:
                see_z = partial(_see_z, visitor, index, index == layers[0][0])
                for hook in (
                    layer.head_outputs.register_forward_hook(see_z),
                    layer.head_sum.register_forward_hook(partial(_see_y, visitor, index)),
                    layer.register_forward_hook(partial(_see_stream, visitor, index)),
                ):
                    stack.callback(hook.remove)
                if visitor.wants_attention:
                    stack.callback(setattr, layer, "core", layer.core)
                    layer.core = partial(_attend_watched, layer.core, visitor, index)
            yield

    def nats(self, batch: Batch, memory: Any = None) -> tuple[Tensor, Memory]:
        """(B, T) nats of the targets, 0 where not scored, and the memory afterwards; see `HeadModel`.

        Raises:
            ValueError: a token follows padding, which the layers would read as text.
        """
        if bool((batch.real[:, 1:] & ~batch.real[:, :-1]).any()):
            raise ValueError("a model of allattn reads padding at the end of a row only")
        words = words_of(batch.ids, batch.targets, self.model)
        before = self.model.empty_memory(len(batch.ids)) if memory is None else memory
        self._real = to_device(batch.real, self.device)
        try:
            nats, after = self.model(words.inputs, words.targets, before, counts=words.counts)
        finally:
            self._real = None
        return nats, after

    def _begins(self, visitor: Visitor, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]  # (B, T, d)
        real = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if self._real is None else self._real
        )
        visitor.begins(real)


def _see_z(
    visitor: Visitor, index: int, first: bool, place: nn.Module, args: Any, z: Tensor
) -> Tensor | None:
    """Show (B, T, h, c); (B, h, c) where a text is read word by word, without the layers' forward pass."""
    if z.ndim == 4:
        return visitor.z(index, z)
    if first:
        visitor.begins(z.new_ones(len(z), 1, dtype=torch.bool))
    changed = visitor.z(index, z.unsqueeze(1))
    return None if changed is None else changed.squeeze(1)


def _see_y(visitor: Visitor, index: int, place: nn.Module, args: Any, y: Tensor) -> Tensor | None:
    """Show (B, T, d), likewise."""
    if y.ndim == 3:
        return visitor.y(index, y)
    changed = visitor.y(index, y.unsqueeze(1))
    return None if changed is None else changed.squeeze(1)


def _see_stream(visitor: Visitor, index: int, layer: nn.Module, args: Any, output: Tensor) -> None:
    visitor.stream(index, output)


def _attend_watched(core: Core, visitor: Visitor, index: int, inputs: CoreInputs) -> Tensor:
    with torch.no_grad(), no_autocast(inputs.q.device):
        dtype = inputs.q.dtype
        same = CoreInputs._make((*(x.to(dtype) for x in inputs.tensors), *inputs.numbers))
        weights = attention_weights(same).movedim(0, 1)  # (B, h, T, S + N)
        batch, keys = same.v.shape[:2]
        persistent = (same.value_scale * same.pv).expand(batch, -1, -1, -1)  # (B, N, h, c)
        values = torch.cat([same.v, persistent], dim=1)  # (B, S + N, h, c)
    memory = keys - inputs.q.shape[1]
    visitor.attention(index, Attention(weights, values, memory, len(inputs.pv)))
    return core(inputs)
