"""A pretrained model with gates as a model whose heads are watched.

B sequences, T tokens, h heads kept, H heads of the network, dv head width, d width of the residual stream
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allattn.devices import to_device
from allattn.errors import InputError
from allattn.heads.watched import Batch, Visitor
from allattn.pretrained.language_model import PretrainedLM


class PretrainedLayer:
    """The heads of one layer; a `HeadLayer`."""

    def __init__(self, model: PretrainedLM, layer: int) -> None:
        sizes = model.config
        self._projection = model.attentions[layer].projection
        self._transposed = model.attentions[layer].output == "c_proj"
        self._scale = sizes.scale(layer)
        self.width = sizes.head_width
        self.heads = sizes.heads_present[layer]
        self.groups = self.heads // sizes.heads_per_group if sizes.masked else len(sizes.groups_kept(layer))
        self.places = sizes.kept(layer) if sizes.masked else None  # of the heads among H; None = h is all

    def output_blocks(self) -> Tensor:
        """(h, dv, d): WO^(h) times s_g."""
        weight: Tensor = self._projection.weight
        rows = weight if self._transposed else weight.T
        blocks = (
            rows.unflatten(0, (-1, self.width)) if len(rows) else rows.new_empty(0, self.width, rows.shape[1])
        )
        return (blocks if self.places is None else blocks[self.places]) * self._scale

    def output_bias(self) -> Tensor | None:
        """(d,), or None."""
        bias: Tensor | None = self._projection.bias
        return bias


class PretrainedModel:
    """A `PretrainedLM` as a `HeadModel`; attention weights are not shown."""

    def __init__(self, model: PretrainedLM) -> None:
        self.model = model
        self.layers = [PretrainedLayer(model, layer) for layer in range(model.config.layers)]
        self._real: Tensor | None = None  # (B, T) of the pass that runs

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @contextmanager
    def watch(self, visitor: Visitor) -> Iterator[None]:
        """Inside, the model is in evaluation mode and `visitor` sees its forward passes; see `HeadModel`.

        Raises:
            InputError: the visitor wants attention weights.
        """
        if visitor.wants_attention:
            raise InputError(
                f"a pretrained model ({self.model.config.family}) shows no attention weights here: take a "
                "score of head outputs, such as ahon_ln; allattn study has all of them"
            )
        with ExitStack() as stack:
            stack.callback(self.model.train, self.model.training)
            self.model.eval()
            begins = self.model.register_forward_pre_hook(partial(self._begins, visitor))
            stack.callback(begins.remove)
            for index, layer in enumerate(self.layers):
                if not layer.heads:
                    continue
                projection = self.model.attentions[index].projection
                for hook in (
                    # before the model's own hook, which multiplies by s_g
                    projection.register_forward_pre_hook(
                        partial(_see_z, visitor, index, layer), prepend=True
                    ),
                    projection.register_forward_hook(partial(_see_y, visitor, index)),
                    self.model.layers[index].register_forward_hook(partial(_see_stream, visitor, index)),
                ):
                    stack.callback(hook.remove)
            yield

    def nats(self, batch: Batch, memory: Any = None) -> tuple[Tensor, None]:
        """(B, T) nats of the targets, 0 where not scored; there is no memory.

        Raises:
            ValueError: a token follows padding, which the network would read as text.
        """
        if bool((batch.real[:, 1:] & ~batch.real[:, :-1]).any()):
            raise ValueError("a pretrained model reads padding at the end of a row only")
        ids, targets = to_device(batch.ids, self.device), to_device(batch.targets, self.device)
        self._real = to_device(batch.real, self.device)
        try:
            nats, _ = self.model(ids, targets, [])
        finally:
            self._real = None
        return nats, None

    def _begins(self, visitor: Visitor, model: nn.Module, args: tuple[Tensor, ...]) -> None:
        visitor.begins(torch.ones_like(args[0], dtype=torch.bool) if self._real is None else self._real)


def _see_z(visitor: Visitor, index: int, layer: PretrainedLayer, place: nn.Module, args: Any) -> Any:
    z = args[0].unflatten(-1, (-1, layer.width))  # (B, T, h or H, dv)
    changed = visitor.z(index, z if layer.places is None else z[:, :, layer.places])
    if changed is None:
        return None
    if layer.places is not None:
        changed = z.index_copy(2, torch.tensor(layer.places, device=z.device), changed)
    return (changed.flatten(-2), *args[1:])


def _see_y(visitor: Visitor, index: int, place: nn.Module, args: Any, y: Tensor) -> Tensor | None:
    return visitor.y(index, y)


def _see_stream(visitor: Visitor, index: int, layer: nn.Module, args: Any, output: Any) -> None:
    visitor.stream(index, output[0] if isinstance(output, tuple) else output)
