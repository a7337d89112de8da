"""Fully sharded data parallelism: each process holds a part of every weight, its gradient and its moments.

`trainer.strategy=fsdp`. torch's `fully_shard` gathers a layer's weights for the layer's own work and averages
gradients over the processes. Each weight stays a tensor of its own (a DTensor), so whatever is computed of a
weight, LAMB's trust ratio too, is of the whole. Checkpoints hold whole tensors, the same as without sharding.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from allattn.model.gated import GatedLM


def shard(model: GatedLM, mesh: DeviceMesh) -> None:
    """Shard a model in place: each layer as one group, everything else (the tied tables too) as another.

    Weights without effect, of layers with no heads, stay as they are in every process.
    """
    idle = {p for p in model.parameters() if not p.requires_grad}
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=idle)
    register_fsdp_forward_method(model, "with_first_level")


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average over the processes the gradients of weights that every process holds whole."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for gradient, mean in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def clip_sharded(parameters: list[nn.Parameter], largest_norm: float) -> Tensor:
    """`clip_gradients` where some of the parameters, or all, are sharded."""
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    sharded: list[nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
    norms = [_total_norm(kind) for kind in (whole, sharded) if kind]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in (whole, sharded):
        nn.utils.clip_grads_with_norm_(kind, largest_norm or math.inf, norm)
    return norm


def is_finite(value: Any) -> bool:
    """Whether all numbers are finite; for a sharded tensor every process answers for the whole."""
    count = torch.isfinite(torch.as_tensor(value)).logical_not().sum()
    return not (count.full_tensor() if isinstance(count, DTensor) else count)


def _total_norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for DTensors, with this project's checkpoints: one file of whole tensors.

    Args:
        processes: over all nodes.
    """

    def __init__(self, processes: int) -> None:
        super().__init__(
            data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer's state comes by `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors in the first process, which writes; None in their place in the others."""
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors in the first process, None in their place in the others."""
        return self._gathered(Strategy.optimizer_state(self, optimizer))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The file's content; every process reads it."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each process takes its parts of the whole tensors."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {name: _part(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each process takes its parts of the moments, which are split as their parameters are."""
        states = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            moments = {
                number: {name: _part(value, parameters[number]) for name, value in entries.items()}
                for number, entries in state["state"].items()
            }
            states.append({**state, "state": moments})
        Strategy.load_optimizer_state_dict(self, {"optimizer_states": states})

    def _gathered(self, values: Any) -> Any:
        def whole(value: DTensor) -> Tensor | None:
            gathered = value.full_tensor()  # all processes take part
            return gathered.cpu() if self.is_global_zero else None

        return apply_to_collection(values, DTensor, whole)


def _part(value: Any, like: Any) -> Any:
    """This process's part of a whole tensor where `like`, of the same shape, is sharded; else `value`."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        value = value.to(like.device)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
