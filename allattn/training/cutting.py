"""A checkpoint walked through the removal of heads: weights, optimizer moments and configuration alike."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allattn.families import sizes_from_dict
from allattn.heads.ranking import Scope
from allattn.pruning.gates import by_head, decide_gates
from allattn.pruning.phase import Phase
from allattn.pruning.surgery import RemovalPlan, cut_tensor, plan_removal
from allattn.training.checkpoints import MODEL_PREFIX, gate_parameters, has_gates
from allattn.training.optimizers import select_parameters


def freeze_plan(checkpoint: dict[str, Any]) -> RemovalPlan:
    """The removal of the heads whose gates a gate-phase checkpoint has closed."""
    meta = checkpoint["allattn"]
    scope = Scope(meta.get("scope", Scope.all_layers.value))
    gates = decide_gates(gate_parameters(checkpoint), meta["target_sparsity"], scope)
    gates = by_head(gates, meta.get("heads_per_gate", 1))
    return plan_removal(sizes_from_dict(meta["model"]), gates, meta["output_scaling"])


def cut_checkpoint(
    checkpoint: dict[str, Any], plan: RemovalPlan, bias: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """Remove heads from a checkpoint: weights, optimizer moments, configuration.

    Step count, schedule position, segment memory and everything else stay; gates, if there are any, and
    their optimizer state go, and pi is noted. Training continues from the result with the smaller model.

    Args:
        checkpoint: of training, before the removal.
        plan: the removal.
        bias: per layer (d,), added to the layer's output bias in place of the heads that go.
    """
    state = {
        name: cut_tensor(name.removeprefix(MODEL_PREFIX), tensor, plan).clone()
        for name, tensor in checkpoint["state_dict"].items()
        if name.startswith(MODEL_PREFIX)
    }
    for layer, added in enumerate(bias or []):
        own = state[f"{MODEL_PREFIX}layers.{layer}.bias"]
        own += added.to(own)
    meta = {**checkpoint["allattn"], "model": plan.after.to_dict(), "phase": Phase.fine_tune.value}
    if has_gates(checkpoint):
        pi = by_head(gate_parameters(checkpoint), meta.get("heads_per_gate", 1))
        meta["pi"] = [layer.tolist() for layer in pi]
        meta["heads_before"] = [plan.before.kept(layer) for layer in range(plan.before.layers)]
    cut = {**checkpoint, "state_dict": state, "allattn": meta}
    if "optimizer_states" in checkpoint:
        cut["optimizer_states"] = [cut_optimizer_state(s, plan) for s in checkpoint["optimizer_states"]]
    return cut


def at_freeze(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of the gate phase without its closed heads and without what only training needs."""
    weights = {name: part for name, part in checkpoint.items() if name != "optimizer_states"}
    return cut_checkpoint(weights, freeze_plan(checkpoint))


def cut_optimizer_state(state: dict[str, Any], plan: RemovalPlan) -> dict[str, Any]:
    """An optimizer's state dict without the removed heads' moments and without the gates' group.

    Moments have their parameter's shape and are cut like it; other entries (step counts) pass as they are.
    """
    state = select_parameters(state, plan.trained)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    moments = {
        number: {key: _cut_entry(names[number], value, plan) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": moments}


def _cut_entry(name: str, value: Any, plan: RemovalPlan) -> Any:
    return cut_tensor(name, value, plan).clone() if isinstance(value, Tensor) and value.ndim else value
