"""Copies to a device without waiting for it, and in which precision it multiplies."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`; from the CPU to a GPU by way of pinned memory, which the host need not wait for."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the dtype of what they are given, on a device that knows nothing of autocast too."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


@contextmanager
def float32_products(how: str) -> Iterator[None]:
    """Inside, torch.set_float32_matmul_precision is `how`; afterwards it is as before.

    On a GPU "high" lets products of float32 numbers be of TF32 ones, "highest" does not.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
