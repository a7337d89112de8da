"""Initial values, drawn by the module that owns a weight and by nothing else."""

from torch import Tensor, nn


def normal_(tensor: Tensor, std: float = 1.0) -> None:
    """N(0, std^2) in place; nothing on the device meta, where torch would import its compiler for it."""
    if not tensor.is_meta:
        nn.init.normal_(tensor, std=std)


class UnfilledLinear(nn.Linear):
    """A linear map whose values are left for its owner to fill (its weight may have no elements)."""

    def reset_parameters(self) -> None:
        """Draw nothing."""
