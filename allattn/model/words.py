"""The words of a segment, on the model's device and counted by band."""

from typing import NamedTuple

from torch import Tensor

from allattn.devices import to_device
from allattn.model.bands import BandCounts, count_bands
from allattn.model.gated import GatedLM


class Words(NamedTuple):
    """Arguments of `GatedLM.forward`."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    counts: BandCounts | None  # None on a CPU, where nobody waits for them


def words_of(inputs: Tensor, targets: Tensor, model: GatedLM) -> Words:
    """Count words that are on the CPU, and copy them to the model's device without waiting for it.

    Args:
        inputs: (B, T) int64.
        targets: (B, T) int64, negative = not scored.
        model: on any device.
    """
    device = model.device
    counts = None if device.type == "cpu" else count_bands(inputs, targets, model.config.band_ends)
    return Words(to_device(inputs, device), to_device(targets, device), counts)
