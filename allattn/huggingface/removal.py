"""Removal of heads from a causal language model of transformers, in three forms.

    h query heads and g key/value heads of a layer, dv head width

A key/value head goes with the last of its query heads. transformers lets each key/value head of a layer serve
equally many query heads, so whole groups go, or as many heads of every group.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from allattn.errors import InputError, first_line
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.per_layer import (
    KINDS,
    UNIFORM_KINDS,
    WHOLE_WIDTH_KINDS,
    kind_of,
    own_type,
    sizes_of_network,
)
from allattn.pretrained.architecture import attentions, why_uncut
from allattn.pretrained.language_model import NETWORK, layers_of
from allattn.pretrained.sizes import PretrainedSizes
from allattn.pruning.surgery import RemovalPlan, cut_tensor, plan_removal
from allattn.training.foreign_settings import Form


def without_heads(model: ForeignModel, gates: Sequence[Tensor], form: Form) -> PreTrainedModel:
    """The network without the heads whose gate is 0; weights that stay whole are shared with `model`.

    Args:
        model: is left as it was.
        gates: per layer (h,) 0/1, one for each head present.
        form: of the result.

    Raises:
        InputError: heads of this architecture cannot be removed, or not these in this form.
    """
    if form is Form.masked:
        return _masked(model, gates)
    network, (plan, after) = model.model, plan_of(model, gates, form)
    config = config_of(after, form)
    state = {name: cut_tensor(NETWORK + name, t, plan) for name, t in network.state_dict().items()}
    own: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return filled(config, state, network, own)


def plan_of(model: ForeignModel, gates: Sequence[Tensor], form: Form) -> tuple[RemovalPlan, PretrainedSizes]:
    """The plan of a real removal, and the sizes afterwards.

    Raises:
        InputError: as `without_heads`.
    """
    kind = kind_of(model.config)
    _check_width(kind, form)
    sizes = sizes_of_network(model.config)
    if reason := why_uncut(attentions(model.model, layers_of(model.model))[0], sizes):
        raise InputError(f"{reason}: heads can be zeroed (form=masked), not removed")
    if kind not in KINDS:
        raise InputError(
            f"model_type={kind}: where its queries, keys and values are is not known; heads can be zeroed "
            f"(form=masked), and removed from {', '.join(KINDS)}"
        )
    plan = plan_removal(sizes, gates, output_scaling=False)
    assert isinstance(plan.after, PretrainedSizes)
    check_form(plan.after, form)
    return plan, plan.after


def check_form(sizes: PretrainedSizes, form: Form) -> None:
    """Refuse a form other than masked that these heads cannot have.

    Raises:
        InputError: says which layer has the wrong number, and what to do.
    """
    _check_width(sizes.family, form)
    _check_groups(sizes)
    if form is Form.uniform:
        _check_uniform(sizes)


def _check_width(kind: str, form: Form) -> None:
    if form is Form.uniform and kind in WHOLE_WIDTH_KINDS:
        raise InputError(
            f"form=uniform: a {kind} computes its head width as hidden_size / heads, so it cannot have fewer "
            "heads in its own class: give form=per_layer or form=masked"
        )


def cache_bytes_per_token(model: ForeignModel) -> int:
    """Bytes that the keys and values of one token take in all layers, in the weights' dtype."""
    return sum(2 * layer.groups * layer.head_width for layer in model.layers) * model.model.dtype.itemsize


def _check_groups(sizes: PretrainedSizes) -> None:
    for layer in range(sizes.layers):
        heads = Counter(sizes.groups_of(layer))
        if len(set(heads.values())) > 1:
            counts = ", ".join(str(heads[group]) for group in sorted(heads))
            raise InputError(
                f"layer {layer} would keep {counts} query heads of its key/value heads, which must serve "
                "equally many: let whole groups go, or as many heads of each, or give form=masked"
            )


def _check_uniform(sizes: PretrainedSizes) -> None:
    counts = {(len(sizes.kept(i)), len(sizes.groups_kept(i))) for i in range(sizes.layers)}
    if len(counts) > 1:
        least, most = min(counts), max(counts)
        raise InputError(
            f"form=uniform needs as many heads in every layer, but a layer would keep {least[0]} and another "
            f"{most[0]}: give form=per_layer or form=masked"
        )
    if counts == {(0, 0)}:
        raise InputError("form=uniform: no layer would keep a head; give fewer heads to remove")


def config_of(sizes: PretrainedSizes, form: Form) -> Any:
    """The configuration of what stays.

    Raises:
        InputError: transformers takes no such sizes.
    """
    kind = str(sizes.network["model_type"])
    if form is Form.per_layer:
        kind, own = own_type(kind), {"heads_kept": sizes.heads_kept, "head_width": sizes.head_width}
        return CONFIG_MAPPING[kind].from_dict({**sizes.network, "model_type": kind, **own})
    assert kind in UNIFORM_KINDS
    heads, groups = len(sizes.kept(0)), len(sizes.groups_kept(0))
    counts = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": sizes.head_width}
    try:
        return CONFIG_MAPPING[kind].from_dict({**sizes.network, **counts})
    except Exception as error:  # of its own checks
        raise InputError(
            f"form=uniform: transformers takes no {kind} of {heads} heads ({first_line(error)}); keep "
            "another number, or give form=per_layer"
        ) from None


def _masked(model: ForeignModel, gates: Sequence[Tensor]) -> PreTrainedModel:
    network = model.model
    copied = filled(network.config, network.state_dict(), network, type(network))
    for layer, gate in zip(ForeignModel(copied, model.projection).layers, gates, strict=True):
        layer.close(gate)
    return copied


def filled(
    config: Any, state: Mapping[str, Tensor], like: PreTrainedModel, kind: type[PreTrainedModel]
) -> PreTrainedModel:
    """A network of this configuration with these weights, not copied; buffers and mode of `like`."""
    with torch.device("meta"):
        network = kind(config)
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    buffers = dict(like.named_buffers())
    for name, buffer in list(network.named_buffers()):
        owner, _, own = name.rpartition(".")
        if buffer.is_meta:
            network.get_submodule(owner)._buffers[own] = buffers[name].clone()
    network.generation_config = like.generation_config
    return network.train(like.training)
