"""Relative positions (Dai et al., Transformer-XL): the learned table of distances."""

import torch
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.model.config import ModelConfig
from allattn.model.initial import normal_


class RelativePositions(nn.Module):
    """One learned row per distance query - key = 0, 1, 2, ...; shared by all layers, projected per layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.position_rows, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Unit variance, like a token's embedding after its factor sqrt(d)."""
        normal_(self.table)

    def forward(self, keys: int, window: int) -> Tensor:
        """Rows for the distances 0..keys-1 -> (keys, d).

        Distances beyond `window` are never visible; their rows repeat the last visible one, so that the
        table needs no more than window + 1 rows.

        Raises:
            InputError: a visible distance has no row.
        """
        visible = min(keys, window + 1)
        if visible > len(self.table):
            raise InputError(
                f"distances up to {visible - 1} occur but model.position_rows={len(self.table)}: lower the "
                "memory or segment length, or train with more position_rows"
            )
        distances = torch.arange(keys, device=self.table.device).clamp(max=visible - 1)
        return self.table[distances]
