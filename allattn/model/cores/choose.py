"""Which attention core computes: the only place that knows devices."""

import torch
from torch import Tensor

from allattn.model.cores.inputs import Core, CoreInputs
from allattn.model.cores.plain import attend_plain
from allattn.model.cores.recompute import attend_recompute
from allattn.model.cores.workspace import ELSEWHERE, ON_CPU


def recompute(inputs: CoreInputs) -> Tensor:
    """`attend_recompute` as the inputs' device draws and keeps."""
    return attend_recompute(inputs, ON_CPU if inputs.q.device.type == "cpu" else ELSEWHERE)


CORES: dict[str, Core] = {"plain": attend_plain, "recompute": recompute}


def choose(wanted: str, device: torch.device, compiled: bool) -> str:
    """The name in CORES of the core to compute with.

    Args:
        wanted: a name in CORES, or auto: plain for compiled layers, as torch.compile sees nothing inside the
            other one, and on devices other than CPU and CUDA; else recompute.
        device: where the layers are.
        compiled: whether torch.compile has them.
    """
    if wanted != "auto":
        return wanted
    return "recompute" if device.type in ("cpu", "cuda") and not compiled else "plain"


def attend(inputs: CoreInputs) -> Tensor:
    """The core of a layer that was told nothing, chosen at every call: the layer may move and be compiled."""
    return CORES[choose("auto", inputs.q.device, torch.compiler.is_compiling())](inputs)
