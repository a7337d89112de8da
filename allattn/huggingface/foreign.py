"""A causal language model of transformers, whoever wrote its class, as a model whose heads can be watched.

The input of a layer's output projection is Z of all heads side by side, whatever computes attention, so hooks
there see and change it. Attention weights come from the model's own eager function.

    B sequences, T tokens, N' keys, h query heads, g key/value heads, dv head width, d width
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.pytorch_utils import Conv1D

from allattn.errors import InputError
from allattn.heads.watched import Attention, Batch, Visitor
from allattn.huggingface.places import Place, places

WATCHED = "allattn_watched"  # transformers' name of `_watched_attention`
_NOT_SCORED = -100
_watchers: dict[nn.Module, list[Callable[[Tensor, Tensor], None]]] = {}  # of attention modules


class ForeignLayer:
    """The heads of one layer.

    Args:
        projection: WO; None = the layer has no heads.
        head_width: dv.
        groups: g.
    """

    def __init__(self, projection: Any | None, head_width: int, groups: int) -> None:
        self._projection = projection
        self.head_width = head_width
        self.heads = 0 if projection is None else _input_width(projection) // head_width
        self.groups = groups if self.heads else 0

    def output_blocks(self) -> Tensor:
        """(h, dv, d)."""
        if self._projection is None:
            return torch.empty(0, self.head_width, 0)
        weight: Tensor = self._projection.weight
        rows = weight if isinstance(self._projection, Conv1D) else weight.T  # (h * dv, d)
        return rows.unflatten(0, (self.heads, self.head_width))

    def close(self, gate: Tensor) -> None:
        """Let the heads whose `gate` (h,) is 0 write nothing, by new weights in the place of the old."""
        if self._projection is None or bool(gate.all()):
            return
        self._projection.weight = nn.Parameter(self._projection.weight.detach().clone())
        with torch.no_grad():
            self.output_blocks()[gate.to(self._projection.weight.device) == 0] = 0  # a view

    def output_bias(self) -> Tensor | None:
        """(d,), or None."""
        return getattr(self._projection, "bias", None)


class ForeignModel:
    """A `HeadModel`.

    Args:
        model: with a language modelling head, on its device; put into evaluation mode.
        projection: see `places`.

    Raises:
        InputError: the output projections are not found, or do not fit the number of heads.
    """

    def __init__(self, model: PreTrainedModel, projection: str | None = None) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self.projection = projection
        self.places = places(model, projection)
        self.head_width = self._head_width()
        self.layers: Sequence[ForeignLayer] = [
            ForeignLayer(place.projection, self.head_width, self._groups(place)) for place in self.places
        ]
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @contextmanager
    def watch(self, visitor: Visitor) -> Iterator[None]:
        """Inside, `visitor` sees every forward pass; after it, or an error, nothing of it is left.

        Raises:
            InputError: the visitor wants attention weights and the model's class does not compute them.
        """
        watching = _Watching(visitor)
        with ExitStack() as stack:
            begins = self.model.register_forward_pre_hook(watching.begins, with_kwargs=True)
            stack.callback(begins.remove)
            for index, (place, layer) in enumerate(zip(self.places, self.layers, strict=True)):
                if place.projection is not None and layer.heads:
                    for hook in (
                        place.projection.register_forward_pre_hook(partial(watching.z, index, layer)),
                        place.projection.register_forward_hook(partial(watching.y, index)),
                        place.layer.register_forward_hook(partial(watching.stream, index)),
                    ):
                        stack.callback(hook.remove)
                    if visitor.wants_attention:
                        seen = partial(watching.attention, index)
                        _watchers.setdefault(place.attention, []).append(seen)
                        stack.callback(_forget, place.attention, seen)
            if visitor.wants_attention:
                self._compute_watched(stack)
            yield

    def nats(self, batch: Batch, memory: Any = None) -> tuple[Tensor, None]:
        """(B, T) float32 nats of the targets, 0 where not scored; there is no memory."""
        ids, targets = batch.ids.to(self.device), batch.targets.to(self.device)
        options: dict[str, Tensor] = {}
        if not bool(batch.real.all()):
            real = batch.real.to(self.device)
            options["attention_mask"] = real.long()
            if self._takes_positions:  # as a row has them alone
                options["position_ids"] = (real.long().cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, use_cache=False, **options).logits  # (B, T, V)
        places = targets.masked_fill(targets < 0, _NOT_SCORED)
        rows = [_row_nats(*row) for row in zip(logits, places, strict=True)]  # one at a time in float32
        return torch.stack(rows), None

    def _compute_watched(self, stack: ExitStack) -> None:
        """Let attention be computed by `_watched_attention` until the stack ends."""
        modules = [
            place.attention for place, layer in zip(self.places, self.layers, strict=True) if layer.heads
        ]
        for module in modules:
            _eager(module)
        every = [self.model.config, self.config, *(getattr(m, "config", self.config) for m in modules)]
        configs = list({id(config): config for config in every}.values())
        for config in configs:
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        for config in configs:
            config._attn_implementation = WATCHED

    def _head_width(self) -> int:
        """dv: said by a configuration of ours, else what every head has of the first projection's input."""
        if found := getattr(self.config, "head_width", None):
            return int(found)
        heads = getattr(self.config, "num_attention_heads", None)
        width = next(_input_width(place.projection) for place in self.places if place.projection is not None)
        if not heads or width % heads:
            raise InputError(
                f"the output projection takes {width} numbers, which {heads} heads do not share evenly: name "
                "it by projection=model.layers.*.self_attn.o_proj or the like"
            )
        return int(width // heads)

    def _groups(self, place: Place) -> int:
        keys = getattr(place.attention, "k_proj", None)
        if isinstance(keys, nn.Linear):
            return keys.out_features // self.head_width
        if place.projection is None:
            return 0
        return getattr(self.config, "num_key_value_heads", None) or (
            _input_width(place.projection) // self.head_width
        )


class _Watching:
    """What the hooks of one `watch` share."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor
        self._real = torch.empty(0)  # (B, T) of the pass that runs

    def begins(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = args[0] if args else options["input_ids"]  # (B, T)
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._real = mask[:, -ids.shape[1] :].bool()
        else:
            self._real = torch.ones_like(ids, dtype=torch.bool)
        self._visitor.begins(self._real)

    def z(self, index: int, layer: ForeignLayer, projection: nn.Module, args: tuple[Any, ...]) -> Any:
        z = args[0].unflatten(-1, (layer.heads, layer.head_width))  # (B, T, h, dv)
        changed = self._visitor.z(index, z)
        return None if changed is None else (changed.flatten(-2), *args[1:])

    def y(self, index: int, projection: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        return self._visitor.y(index, y)

    def stream(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        self._visitor.stream(index, output[0] if isinstance(output, tuple) else output)

    def attention(self, index: int, weights: Tensor, value: Tensor) -> None:
        weights = weights * self._real[:, None, :, None]  # (B, h, T, N'); a padded query looks at nothing
        memory = weights.shape[3] - weights.shape[2]  # what a cache holds
        self._visitor.attention(index, Attention(weights, value.transpose(1, 2), memory, persistent=0))


def _watched_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The module's own eager attention, shown to who watches it."""
    output, weights = _eager(module)(module, query, key, value, mask, **options)
    for seen in _watchers.get(module, ()):
        seen(weights, value)
    return output, weights


AttentionInterface.register(WATCHED, _watched_attention)
AttentionMaskInterface.register(WATCHED, eager_mask)


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """What computes attention with its weights for a module.

    Raises:
        InputError: its class has no such function.
    """
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise InputError(
            f"{type(module).__name__} gives no attention weights: leave out the scores that need them "
            "(awft, aeqd, ftvvn, avvn)"
        )
    attend: Callable[..., tuple[Tensor, Tensor]] = found
    return attend


def _forget(module: nn.Module, seen: Callable[[Tensor, Tensor], None]) -> None:
    _watchers[module].remove(seen)
    if not _watchers[module]:
        del _watchers[module]


def _row_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """(T, V) and (T,) -> (T,)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=_NOT_SCORED, reduction="none")


def _input_width(projection: Any) -> int:
    """h * dv."""
    if isinstance(projection, Conv1D):
        return projection.weight.shape[0]
    if isinstance(projection, nn.Linear):
        return projection.in_features
    raise InputError(
        f"the output projection is a {type(projection).__name__}, neither a Linear nor a Conv1D: name it "
        "by projection=model.layers.*.self_attn.o_proj or the like"
    )
