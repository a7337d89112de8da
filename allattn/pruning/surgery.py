"""Removal of heads: make a plan, look at it, apply it to configuration and weights.

Removing head i of All-attention takes {WQ_i, WK_i, WV_i, PK_i, PV_i, WO_i}, its block of the position
projection, and u_i, v_i (method: structural removal); of another model what its `head_parts` name. s_g stays
the constant it was when the gates were decided.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.families import filled, sizes_only
from allattn.model.gated import GatedLM, HeadPart, Sizes
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import Trained
from allattn.pruning.gates import output_scale

LM = TypeVar("LM", bound=GatedLM)


@dataclass(frozen=True)
class RemovalPlan:
    """What stays: per layer the positions among the heads present, and the configuration afterwards."""

    keep: list[list[int]]
    before: Sizes
    after: Sizes

    @property
    def removed(self) -> list[list[int]]:
        """Original indices of the heads that go, per layer."""
        pairs = [(self.before.kept(i), set(self.after.kept(i))) for i in range(self.before.layers)]
        return [[head for head in old if head not in new] for old, new in pairs]

    @cached_property
    def head_parts(self) -> dict[str, HeadPart]:
        """See `GatedLM.head_parts`."""
        return sizes_only(self.before).head_parts

    @cached_property
    def trained(self) -> set[str]:
        """Names of the parameters that are trained afterwards."""
        return sizes_only(self.after).trained

    def __str__(self) -> str:
        present = self.before.heads_kept_total
        lines = [f"remove {present - self.after.heads_kept_total} of {present} heads"]
        for layer, heads in enumerate(self.removed):
            if heads:
                lines.append(f"  layer {layer}: heads {', '.join(map(str, heads))}")
        return "\n".join(lines)


def plan_removal(config: Sizes, gates: Sequence[Tensor], output_scaling: bool) -> RemovalPlan:
    """Plan the removal of every head whose gate is 0.

    Args:
        config: the model as it is.
        gates: per layer (h,) 0/1, one for each head present.
        output_scaling: fix s_g = min(H / heads kept, H); otherwise each layer keeps its scale.

    Raises:
        InputError: a gate is neither 0 nor 1, their number does not match the heads present, or the
            model is an inference export whose s_g is already inside WO.
    """
    if config.scale_absorbed:
        raise InputError(
            "this model is an inference export with s_g absorbed into WO: prune from its training checkpoint"
        )
    if len(gates) != config.layers:
        raise InputError(f"gates of {len(gates)} layers were given for a model of {config.layers}")
    keep, kept, scales = [], [], []
    for layer, gate in enumerate(gates):
        values, present = gate.tolist(), config.kept(layer)
        if len(values) != len(present) or any(value not in (0, 1) for value in values):
            raise InputError(f"layer {layer} has {len(present)} heads but its gates are {values}")
        places = [i for i, value in enumerate(values) if value == 1]
        keep.append(places)
        kept.append([present[i] for i in places])
        scales.append(
            float(output_scale(gate.double(), config.heads)) if output_scaling else config.scale(layer)
        )
    return RemovalPlan(keep, config, config.with_heads(kept, scales))


def cut_tensor(name: str, tensor: Tensor, plan: RemovalPlan) -> Tensor:
    """The part of a parameter, or of an optimizer moment of its shape, that stays.

    Args:
        name: the parameter's name in the model ("layers.3.query.weight"); other names pass whole.
        tensor: the parameter or a tensor of the same shape.
        plan: the removal.
    """
    part = plan.head_parts.get(name)
    if part is None:
        return tensor
    places = part.staying(plan.keep[part.layer])
    return tensor.index_select(part.axis, torch.tensor(places, dtype=torch.long, device=tensor.device))


def cut_model(model: LM, plan: RemovalPlan) -> LM:
    """A new, smaller model with the weights that stay; `model` is left as it was."""
    state = {name: cut_tensor(name, tensor, plan) for name, tensor in model.state_dict().items()}
    return _filled(plan.after, state, model)


def train_only(model: GatedLM, which: Trained) -> None:
    """Let training change these weights alone; those without effect stay untrained."""
    names = {Trained.all: model.trained, Trained.outputs: model.trained & model.outputs, Trained.gates: set()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names[which])


def absorb_scale(model: AllAttentionLM) -> AllAttentionLM:
    """The inference form: s_g multiplied into WO (not into the bias), the same logits."""
    config = replace(copy.deepcopy(model.config), output_scale=None, scale_absorbed=True)
    absorbed = _filled(config, model.state_dict(), model)
    with torch.no_grad():
        for layer, scaled in zip(absorbed.stack, model.stack, strict=True):
            layer.output.weight *= scaled.scale
    return absorbed


def _filled(config: Sizes, state: dict[str, Tensor], like: LM) -> LM:
    """A model of these sizes with these weights; device, type and mode of `like`."""
    model = filled(config, state, like.dtype, like.device).train(like.training)
    return cast(LM, model)


def sparsity(config: Sizes) -> float:
    """Share of the original L * H heads that the model no longer has."""
    return 1 - config.heads_kept_total / config.heads_total
