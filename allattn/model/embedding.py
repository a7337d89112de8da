"""Words to vectors: adaptive embedding (Baevski & Auli, Adaptive Input Representations).

The vocabulary is sorted by frequency and cut into bands; band i has vectors of d / div**i dimensions and a
projection to d. The tables, and the projections of all bands but the first, also serve the output softmax.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allattn.model.bands import places
from allattn.model.config import ModelConfig
from allattn.model.initial import normal_


class AdaptiveEmbedding(nn.Module):
    """Input embedding in frequency bands, multiplied by sqrt(d).

    With no cutoffs there is one band of full width and no projection (a plain table).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width
        self.ends = config.band_ends
        self.word_dropout = config.word_dropout
        self.dropout = nn.Dropout(config.input_dropout)
        starts = [0, *self.ends[:-1]]
        widths = [config.width // config.div**i for i in range(len(self.ends))]
        self.tables = nn.ParameterList(
            torch.empty(end - start, width)
            for start, end, width in zip(starts, self.ends, widths, strict=True)
        )
        self.projections = nn.ParameterList(  # band width -> d
            torch.empty(width, config.width) for width in widths if config.cutoffs
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every band's vectors reach d dimensions with standard deviation 1/sqrt(d)."""
        for table in self.tables:
            normal_(table, std=self.width**-0.5)
        for projection in self.projections:
            normal_(projection, std=projection.shape[0] ** -0.5)

    def forward(self, ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Embed `ids` (B, T) int64 -> (B, T, d); `counts` are the words in each band, if they are known."""
        flat = ids.reshape(-1)
        if len(self.tables) == 1:
            vectors = self._project(F.embedding(flat, self.tables[0]), 0)
        else:
            vectors = self._banded(flat, counts or [None] * len(self.tables))
        vectors = vectors.to(self.tables[0].dtype) * math.sqrt(self.width)  # the residual stream is not mixed
        if self.training and self.word_dropout > 0:
            kept = torch.rand(self.ends[-1], device=ids.device) >= self.word_dropout
            vectors = vectors * (kept[flat] / (1 - self.word_dropout)).unsqueeze(1)
        return self.dropout(vectors).view(*ids.shape, self.width)

    def _banded(self, flat: Tensor, counts: Sequence[int | None]) -> Tensor:
        parts, order = [], []
        start = 0
        for band, (table, end, count) in enumerate(zip(self.tables, self.ends, counts, strict=True)):
            place = places((flat >= start) & (flat < end), count)
            parts.append(self._project(F.embedding(flat[place] - start, table), band))
            order.append(place)
            start = end
        # The bands partition the words, so the inverse of their order puts each vector back in its place.
        return torch.cat(parts)[torch.argsort(torch.cat(order))]

    def _project(self, vectors: Tensor, band: int) -> Tensor:
        return vectors @ self.projections[band] if len(self.projections) else vectors
