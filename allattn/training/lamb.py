"""pytorch-optimizer's LAMB, for sharded weights too."""

from typing import Any

import torch
from pytorch_optimizer import Lamb
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode


class WholeNormLamb(Lamb):
    """LAMB whose trust ratios are of whole weights and updates, also where a process holds parts of them.

    The norm of a DTensor waits to be summed over the processes, and LAMB changes it in place, which torch
    refuses before the sum. Whole weights on a CPU are updated one after the other, which takes less memory
    and time there; on a GPU it would wait for each.
    """

    def _can_use_foreach(self, group: dict[str, Any]) -> bool:
        together = any(p.is_cuda or isinstance(p, DTensor) for p in group["params"])
        return together and bool(super()._can_use_foreach(group))

    def step(self, closure: Any = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _SummedNorms():
            super().step()
        return loss


class _SummedNorms(TorchFunctionMode):
    """Norms of DTensors are summed over the processes at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch._foreach_norm:
            return result
        return [n.redistribute(placements=[Replicate()]) if isinstance(n, DTensor) else n for n in result]
