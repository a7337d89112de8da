"""Where a causal language model of transformers has its layers and their output projections."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from allattn.errors import InputError
from allattn.pretrained.architecture import attentions
from allattn.pretrained.language_model import layers_of


@dataclass(frozen=True)
class Place:
    """One layer."""

    layer: nn.Module
    attention: Any
    projection: Any | None  # WO, a Linear or a Conv1D; None = the layer has no such attention


def places(model: PreTrainedModel, projection: str | None) -> list[Place]:
    """All layers in order.

    Args:
        model: on any device.
        projection: the output projection of a layer by its name in the model, * = the layer's number; None =
            found by the names that Llama, Mistral, Qwen, OLMo, Gemma, GPT-2, GPT-NeoX and their kin use.

    Raises:
        InputError: there are no such layers or projections.
    """
    if projection is not None:
        return _named(model, projection)
    try:
        layers = layers_of(model)
        found = attentions(model, layers)
    except InputError:
        raise InputError(
            f"model_type={model.config.model_type}: where its heads are is not known; name the output "
            "projection of a layer, such as projection=model.layers.*.self_attn.o_proj"
        ) from None
    return [Place(layer, one.module, one.projection) for layer, one in zip(layers, found, strict=True)]


def _named(model: PreTrainedModel, projection: str) -> list[Place]:
    stack, star, inner = projection.partition(".*.")
    layers = dict(model.named_modules()).get(stack)
    if not star or not isinstance(layers, nn.ModuleList):
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise InputError(
            f"projection={projection}: is not LAYERS.*.PROJECTION with a list of layers of "
            f"{type(model).__name__}; it has {', '.join(lists) or 'none'}"
        )
    found = []
    for layer in layers:
        modules = dict(layer.named_modules())
        attention = modules.get(inner.rpartition(".")[0], layer)
        found.append(Place(layer, attention, modules.get(inner)))
    if all(place.projection is None for place in found):
        names = [name for name, module in layers[0].named_modules() if hasattr(module, "weight")]
        raise InputError(f"projection={projection}: no layer has {inner}; the first has {', '.join(names)}")
    return found
