"""Sizes of a pretrained causal language model: its configuration in transformers, and the heads it has.

L layers, d width, H query heads of a layer before any removal, G key/value heads (H / G query heads share
one), dv head width, V vocabulary
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from allattn.errors import InputError, fits_kind
from allattn.model.heads_kept import HeadsKept

FAMILY = "pretrained"
_KINDS: dict[str, Any] = {
    "network": dict,
    "layers": int,
    "width": int,
    "heads": int,
    "groups": int,
    "head_width": int,
    "vocabulary_size": int,
    "context": int | None,
    "heads_kept": list[list[int]] | None,
    "output_scale": list[float] | None,
    "masked": bool,
}


@dataclass
class PretrainedSizes(HeadsKept):
    """What rebuilds the model; see `Sizes`."""

    network: dict[str, Any]  # the configuration of transformers before any removal, as plain JSON values
    layers: int
    width: int
    heads: int
    groups: int
    head_width: int
    vocabulary_size: int
    context: int | None  # positions that there are
    heads_kept: list[list[int]] | None = None  # original indices, per layer; None = all H
    output_scale: list[float] | None = None  # s_g; None = 1.0
    masked: bool = False  # heads that are gone are multiplied by 0; False: cut out of the weights

    @property
    def family(self) -> str:
        """The name of the architecture in transformers."""
        return str(self.network["model_type"])

    @property
    def heads_per_group(self) -> int:
        """H / G."""
        return self.heads // self.groups

    @property
    def memory_length(self) -> int:
        """No memory is carried from one segment to the next."""
        return 0

    @property
    def scale_absorbed(self) -> bool:
        """Checkpoints keep s_g beside the weights."""
        return False

    @property
    def eos_ends_lines(self) -> bool:
        """The tokenizer is the model's own."""
        return False

    @property
    def band_ends(self) -> list[int]:
        """A plain softmax."""
        return [self.vocabulary_size]

    def groups_of(self, layer: int) -> list[int]:
        """Original index of the key/value head of every head that `layer` has."""
        return [head // self.heads_per_group for head in self.kept(layer)]

    def groups_kept(self, layer: int) -> list[int]:
        """Original indices of the key/value heads that some head of `layer` needs."""
        return sorted(set(self.groups_of(layer)))

    def with_heads(self, kept: list[list[int]], scales: list[float]) -> "PretrainedSizes":
        """The same with these heads and s_g."""
        return replace(copy.deepcopy(self), heads_kept=kept, output_scale=scales)

    def dense(self) -> "PretrainedSizes":
        """The same with all heads, before any removal."""
        return replace(copy.deepcopy(self), heads_kept=None, output_scale=None)

    @property
    def parameters_per_head(self) -> int:
        """Query rows and output columns; keys and values too where no other head shares them."""
        shared = self.heads_per_group > 1
        return (2 if shared else 4) * self.width * self.head_width

    def unit_costs(self, group: bool) -> dict[str, int]:
        """`parameters` and `cache_bytes_per_token` (float32) of a head, or of a group of heads."""
        with_keys = group or self.heads_per_group == 1
        heads = self.heads_per_group if group else 1
        return {
            "parameters": 2 * (heads + with_keys) * self.width * self.head_width,
            "cache_bytes_per_token": 8 * self.head_width if with_keys else 0,
        }

    def cache_bytes_per_token(self, element: int) -> int:
        """Bytes of the keys and values of one token in all layers, `element` bytes a number."""
        if self.masked:
            return 2 * self.layers * self.groups * self.head_width * element
        groups = sum(len(self.groups_kept(layer)) for layer in range(self.layers))
        return 2 * groups * self.head_width * element

    def layer_multiply_adds(self, layer: int) -> int:
        """Of one layer's matrices per token; what attention takes grows with the text and is left out."""
        heads = self.heads_present[layer] if not self.masked else self.heads
        groups = len(self.groups_kept(layer)) if not self.masked else self.groups
        return self._feed_forward + 2 * self.width * self.head_width * (heads + groups)

    def training_multiply_adds(self, segment_length: int) -> float:
        """As of a model whose weights are all trained; attention sees half the segment on average."""
        present = self.heads_total if self.masked else self.heads_kept_total
        attention = present * self.head_width * (segment_length + 1)
        matrices = sum(self.layer_multiply_adds(layer) for layer in range(self.layers))
        return 3 * (matrices + attention + self.width * self.vocabulary_size)

    @cached_property
    def _feed_forward(self) -> int:
        """Elements of a layer's matrices that are not attention's."""
        from allattn.pretrained.language_model import sizes_only

        layer = sizes_only(self.dense()).layers[0]
        matrices = sum(p.numel() for p in layer.parameters() if p.ndim >= 2)
        return matrices - 2 * self.width * self.head_width * (self.heads + self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values; the entry `family` tells them from those of `ModelConfig`."""
        return {"family": FAMILY, **asdict(self)}


def pretrained_sizes_from_dict(values: Mapping[str, Any]) -> PretrainedSizes:
    """The inverse of `PretrainedSizes.to_dict`.

    Raises:
        InputError: an entry is missing, unknown, or contradicts another.
    """
    entries = {name: value for name, value in values.items() if name != "family"}
    wrong = [name for name, kind in _KINDS.items() if not fits_kind(entries.get(name), kind)]
    wrong += sorted(map(str, entries.keys() - _KINDS.keys()))
    if wrong:
        raise InputError(f"the model's configuration has no usable {', '.join(wrong)}")
    sizes = PretrainedSizes(**entries)
    _check(sizes)
    return sizes


def _check(sizes: PretrainedSizes) -> None:
    counts = (sizes.layers, sizes.width, sizes.heads, sizes.groups, sizes.head_width, sizes.vocabulary_size)
    fits = min(counts) >= 1 and sizes.heads % sizes.groups == 0 and "model_type" in sizes.network
    for name in ("heads_kept", "output_scale"):
        value = getattr(sizes, name)
        fits &= value is None or len(value) == sizes.layers
    for layer in sizes.heads_kept or []:
        fits &= layer == sorted(set(layer)) and all(0 <= head < sizes.heads for head in layer)
    if not fits:
        raise InputError("the model's configuration contradicts itself (layers, heads, heads_kept)")
    try:
        json.dumps(sizes.network)
    except (TypeError, ValueError):
        raise InputError("the model's configuration of transformers holds more than plain values") from None
