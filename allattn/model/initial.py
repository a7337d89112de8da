"""Initial values."""

from torch import Tensor, nn


def normal_(tensor: Tensor, std: float = 1.0) -> None:
    """N(0, std^2) in place; nothing on the device meta, where torch would import its compiler for it."""
    if not tensor.is_meta:
        nn.init.normal_(tensor, std=std)
