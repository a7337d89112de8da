"""Model FLOPs utilization (Chowdhery et al., PaLM): the share of the peak that training's own work takes.

What the recomputing core computes twice counts once. Peaks are those of dense bfloat16 (older GPUs: float16)
products with float32 sums, from the makers' data sheets, whatever precision a run has: runs then compare.
"""

import re

import torch

from allattn.model.gated import Sizes

# FLOP/s by words of the device's name; the first that fit hold.
_PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("RTX A6000", 155e12),
    ("RTX 6000 Ada", 364e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 5090", 210e12),
    ("RTX 4090", 165e12),
    ("RTX 3090 Ti", 80e12),
    ("RTX 3090", 71e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_flops(given: float | None, device: torch.device) -> float | None:
    """FLOP/s of one device: `trainer.peak_flops`, else by the GPU's name; None where neither is known."""
    if given is not None or device.type != "cuda":
        return given
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """FLOP/s of a GPU; None for one that the table lacks, of a laptop or a part of a GPU (MIG)."""
    if re.search(r"\b(Laptop|MIG)\b", name):
        return None
    return next((peak for words, peak in _PEAKS if re.search(rf"\b{words}\b", name)), None)


def utilization(config: Sizes, segment_length: int, tokens_per_second: float, peak: float) -> float:
    """Share of `peak`, FLOP/s of all devices together, that training takes; two for each multiply-add."""
    return 2 * config.training_multiply_adds(segment_length) * tokens_per_second / peak
