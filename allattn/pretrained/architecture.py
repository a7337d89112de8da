"""Where a network of transformers keeps the heads of a layer: found by the names of its projections.

dv head width, h query heads, g key/value heads
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.model.gated import HeadPart
from allattn.pretrained.sizes import PretrainedSizes

OUTPUTS = ("o_proj", "c_proj", "dense")  # Llama and most others, GPT-2, GPT-NeoX
SEPARATE, JOINED, INTERLEAVED = ("q_proj", "k_proj", "v_proj"), "c_attn", "query_key_value"


@dataclass(frozen=True)
class Attention:
    """The attention module of one layer."""

    name: str  # in the network
    module: Any
    output: str  # name of its output projection

    @property
    def projection(self) -> Any:
        """WO: a Linear, or a Conv1D, whose weight is transposed."""
        return getattr(self.module, self.output)


def attentions(network: nn.Module, layers: Iterable[nn.Module]) -> list[Attention]:
    """The attention module of every layer.

    Raises:
        InputError: a layer has none whose projections are known.
    """
    names = {module: name for name, module in network.named_modules()}
    found = []
    for index, layer in enumerate(layers):
        here = [
            Attention(names[module], module, output)
            for module in layer.modules()
            for output in OUTPUTS
            if hasattr(module, output) and any(hasattr(module, i) for i in (SEPARATE[0], JOINED, INTERLEAVED))
        ]
        if len(here) != 1:
            raise InputError(
                f"{type(network).__name__}: layer {index} has {len(here)} attention modules with known "
                f"projections ({', '.join(OUTPUTS)}): heads of this architecture cannot be gated"
            )
        found += here
    return found


def why_uncut(attention: Attention, sizes: PretrainedSizes) -> str | None:
    """Why heads of this architecture can be zeroed but not removed; None where they can be."""
    for name in ("q_norm", "k_norm"):
        weight = getattr(getattr(attention.module, name, None), "weight", None)
        if weight is not None and weight.numel() > sizes.head_width:
            return (
                f"{sizes.family} normalizes queries and keys over all heads together ({name}), so that the "
                "removal of one changes the others"
            )
    return None


def head_parts(places: Sequence[Attention], sizes: PretrainedSizes) -> dict[str, HeadPart]:
    """By name in the network, what the heads present have of each parameter."""
    parts = {}
    for layer, attention in enumerate(places):
        heads, kept = list(range(sizes.heads_present[layer])), sizes.groups_kept(layer)
        whose = {"head": heads, "group": [kept.index(group) for group in sizes.groups_of(layer)]}
        by_head = [head for head in heads for _ in range(sizes.head_width)]
        by_group = [group for group in range(len(kept)) for _ in range(sizes.head_width)]
        blocks = {
            SEPARATE[0]: ("head", by_head),
            SEPARATE[1]: ("group", by_group),
            SEPARATE[2]: ("group", by_group),
            JOINED: ("head", 3 * by_head),
            INTERLEAVED: ("head", [head for head in heads for _ in range(3 * sizes.head_width)]),
        }
        transposed = attention.output == "c_proj"
        for projection, (unit, owner) in blocks.items():
            if not hasattr(attention.module, projection):
                continue
            name = f"{attention.name}.{projection}"
            parts[f"{name}.weight"] = HeadPart(layer, int(transposed), owner, whose[unit])
            if getattr(attention.module, projection).bias is not None:
                parts[f"{name}.bias"] = HeadPart(layer, 0, owner, whose[unit])
        parts[f"{attention.name}.{attention.output}.weight"] = HeadPart(
            layer, int(not transposed), by_head, heads
        )
    return parts


def shrink(places: Sequence[Attention], dense: PretrainedSizes, sizes: PretrainedSizes) -> None:
    """Give a network of dense shapes those of `sizes`; the new parameters have no numbers."""
    parts = head_parts(places, dense)
    for layer, attention in enumerate(places):
        kept = sizes.kept(layer)
        for full, part in parts.items():
            if part.layer != layer:
                continue
            projection, _, name = full.removeprefix(f"{attention.name}.").partition(".")
            module = getattr(attention.module, projection)
            old = getattr(module, name)
            shape = list(old.shape)
            shape[part.axis] = len(part.staying(kept))
            setattr(module, name, nn.Parameter(torch.empty(shape, dtype=old.dtype, device=old.device)))
            _note_shape(module)
        _tell_attention(attention, sizes, layer)


def _note_shape(projection: Any) -> None:
    """Let a Linear or a Conv1D say what shape it has."""
    if isinstance(projection, nn.Linear):
        projection.out_features, projection.in_features = projection.weight.shape
    else:
        projection.nx, projection.nf = projection.weight.shape


def _tell_attention(attention: Attention, sizes: PretrainedSizes, layer: int) -> None:
    """Counts that a module of transformers keeps of its heads; which key/value head each query head reads."""
    module, heads, groups = attention.module, sizes.heads_present[layer], sizes.groups_kept(layer)
    if hasattr(module, JOINED):
        module.split_size = heads * sizes.head_width
        module.num_heads = heads
    if not heads:
        module.forward = Headless(attention)
        return
    reads = [groups.index(group) for group in sizes.groups_of(layer)]
    share, rest = divmod(heads, len(groups))
    even = not rest and reads == [head // share for head in range(heads)]
    module.num_key_value_groups = share if even else 1
    module.reads = None if even else reads


class Headless:
    """The attention of a layer whose heads are all gone: what its bias writes."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(self, hidden_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, None]:
        """(B, T, d), and no attention weights; a cache, which counts tokens by layer, gets zeros."""
        from transformers import Cache

        for cache in (given for given in (*rest, *options.values()) if isinstance(given, Cache)):
            counted = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            cache.update(counted, counted, self.attention.module.layer_idx)
        bias = self.attention.projection.bias
        nothing = torch.zeros_like(hidden_states)
        return (nothing if bias is None else nothing + bias), None


def read_unevenly(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa` where query heads share keys and values unevenly (`module.reads`)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if getattr(module, "reads", None) is not None:
        key, value = key[:, module.reads], value[:, module.reads]  # (B, h, T, dv)
    return sdpa_attention_forward(module, query, key, value, mask, **options)
