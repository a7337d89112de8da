"""Removal of heads: make a plan, look at it, apply it to configuration, weights and optimizer moments.

Removing head i takes {WQ_i, WK_i, WV_i, PK_i, PV_i, WO_i}, its block of the position projection, and
u_i, v_i (method: structural removal). s_g stays the constant it was when the gates were decided.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.model.attention import HEAD_AXIS
from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.gates import output_scale


@dataclass(frozen=True)
class RemovalPlan:
    """What stays: per layer the positions among the heads present, and the configuration afterwards."""

    keep: list[list[int]]
    before: ModelConfig
    after: ModelConfig

    @property
    def removed(self) -> list[list[int]]:
        """Original indices of the heads that go, per layer."""
        pairs = [(self.before.kept(i), set(self.after.kept(i))) for i in range(self.before.layers)]
        return [[head for head in old if head not in new] for old, new in pairs]

    def __str__(self) -> str:
        kept = sum(map(len, self.keep))
        present = sum(len(self.before.kept(i)) for i in range(self.before.layers))
        lines = [f"remove {present - kept} of {present} heads"]
        for layer, heads in enumerate(self.removed):
            if heads:
                lines.append(f"  layer {layer}: heads {', '.join(map(str, heads))}")
        return "\n".join(lines)


def plan_removal(config: ModelConfig, gates: Sequence[Tensor], output_scaling: bool) -> RemovalPlan:
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
    after = replace(copy.deepcopy(config), heads_kept=kept, output_scale=scales)
    return RemovalPlan(keep, config, after)


def cut_tensor(name: str, tensor: Tensor, plan: RemovalPlan) -> Tensor:
    """The part of a parameter, or of an optimizer moment of its shape, that stays.

    Args:
        name: the parameter's name in `AllAttentionLM` ("layers.3.query.weight"); other names pass whole.
        tensor: the parameter or a tensor of the same shape.
        plan: the removal.
    """
    layer, axis = _place(name)
    if axis is None:
        return tensor
    c = plan.before.head_width
    index = torch.tensor(
        [head * c + i for head in plan.keep[layer] for i in range(c)], dtype=torch.long, device=tensor.device
    )
    return tensor.index_select(axis, index)


def is_gone(name: str, plan: RemovalPlan) -> bool:
    """Whether a parameter stops being trained: it needs heads, and its layer (or the model) keeps none."""
    layer, axis = _place(name)
    if name.startswith("positions."):
        return not any(plan.keep)
    return (axis is not None or ".norm." in name) and not plan.keep[layer]


def _place(name: str) -> tuple[int, int | None]:
    """Layer of a parameter and the axis of its head blocks; no axis where it belongs to no head."""
    parts = name.split(".")
    if parts[0] != "layers":
        return -1, None
    return int(parts[1]), HEAD_AXIS.get(".".join(parts[2:]))


def cut_model(model: AllAttentionLM, plan: RemovalPlan) -> AllAttentionLM:
    """A new, smaller model with the weights that stay; `model` is left as it was."""
    state = {name: cut_tensor(name, tensor, plan) for name, tensor in model.state_dict().items()}
    table = model.positions.table
    with torch.device("meta"):
        cut = AllAttentionLM(plan.after)
    cut = cut.to_empty(device=table.device).to(table.dtype)
    cut.load_state_dict(state)
    return cut.train(model.training)


def absorb_scale(model: AllAttentionLM) -> AllAttentionLM:
    """The inference form: s_g multiplied into WO (not into the bias), the same logits."""
    config = replace(copy.deepcopy(model.config), output_scale=None, scale_absorbed=True)
    state = dict(model.state_dict())
    for layer in range(model.config.layers):
        name = f"layers.{layer}.output.weight"
        state[name] = state[name] * model.config.scale(layer)
    table = model.positions.table
    with torch.device("meta"):
        absorbed = AllAttentionLM(config)
    absorbed = absorbed.to_empty(device=table.device).to(table.dtype)
    absorbed.load_state_dict(state)
    return absorbed.train(model.training)


def sparsity(config: ModelConfig) -> float:
    """Share of the original L * H heads that the model no longer has."""
    kept = sum(len(config.kept(layer)) for layer in range(config.layers))
    return 1 - kept / (config.layers * config.heads)
