"""Peak memory of one action, each measured in a process of its own."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.subject import Subject, Variant, new_model

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(config: BenchmarkConfig, variant: Variant, action: str, device: torch.device) -> int | None:
    """Most bytes that the first two calls of a `Subject`'s action take on top of those held before them.

    A fresh process, so that nothing freed earlier is used again; two calls, as the second training step has
    the optimizer's moments from its start. They and the gradients are included. On a CPU it is the process's
    resident memory, on a GPU that of torch's allocator.

    Returns:
        None where the system does not tell (resident memory: Linux only).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_peak, config, variant, action, device, torch.get_num_threads()).result()


def _peak(
    config: BenchmarkConfig, variant: Variant, action: str, device: torch.device, threads: int
) -> int | None:
    torch.set_num_threads(threads)
    once = getattr(Subject(new_model(config.model, config.seed), config, variant, device), action)

    def run() -> None:
        once()
        once()

    return peak_of(run, device)


def peak_of(action: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that an action takes on top of those held before it, measured as `peak_bytes` does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        _RESET.write_text("5", encoding="ascii")  # the highest resident memory so far is forgotten
        before = _resident("VmRSS")
        action()
        return _resident("VmHWM") - before
    except OSError:
        return None


def _resident(entry: str) -> int:
    line = next(
        line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{entry}:")
    )
    return int(line.split()[1]) * 1024
