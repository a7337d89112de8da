"""Vectors to words: adaptive softmax tied to the embedding (Grave et al.; tying after Baevski & Auli).

The head holds the first band's words and one cluster row per further band; a word of band i has
log p = log p(cluster i) + log p(word | band i). Tables and tail projections are the embedding's own
parameters; the head projection, the biases and the cluster rows belong to the softmax.
Everything here runs in float32 (or float64), also under mixed precision and with parameters in bfloat16.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allattn.devices import no_autocast
from allattn.model.bands import places
from allattn.model.config import ModelConfig
from allattn.model.embedding import AdaptiveEmbedding
from allattn.model.initial import normal_
from allattn.model.linear_nats import linear_nats


class TiedAdaptiveSoftmax(nn.Module):
    """Log-probabilities of the next word. With no cutoffs: a plain tied softmax with a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ends = config.band_ends
        self.tails = len(self.ends) - 1
        sizes = [end - start for start, end in zip([0, *self.ends[:-1]], self.ends, strict=True)]
        self.biases = nn.ParameterList(torch.zeros(size) for size in sizes)
        if self.tails:
            self.head_projection = nn.Parameter(torch.empty(config.width, config.width))
            self.cluster_weight = nn.Parameter(torch.empty(self.tails, config.width))
            self.cluster_bias = nn.Parameter(torch.zeros(self.tails))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Logits start near unit variance; biases at zero."""
        for bias in self.biases:
            nn.init.zeros_(bias)
        if self.tails:
            width = self.head_projection.shape[0]
            normal_(self.head_projection, std=width**-0.5)
            normal_(self.cluster_weight, std=width**-0.5)
            nn.init.zeros_(self.cluster_bias)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        embedding: AdaptiveEmbedding,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Negative log-likelihood in nats of each target, in token order.

        Args:
            hidden: (B, T, d), any floating dtype.
            targets: (B, T) int64; a negative target is not scored and gets 0.
            embedding: the tied embedding.
            counts: targets in each tail, if they are known.

        Returns:
            (B, T) float32 (float64 for float64 input). A band is computed for the words that lie in it.
        """
        with no_autocast(hidden.device):
            flat = self._wide(hidden).reshape(-1, hidden.shape[-1])
            nats = linear_nats(self._top(flat), self._column(targets), *self._head(embedding))
            return self._with_tails(nats, flat, targets, embedding, counts)

    def with_first_level(
        self,
        hidden: Tensor,
        targets: Tensor,
        embedding: AdaptiveEmbedding,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and the log-probabilities of `first_level` that it takes: (B, T) and (B, T, C)."""
        with no_autocast(hidden.device):
            flat = self._wide(hidden).reshape(-1, hidden.shape[-1])
            log_probs = self.first_level(flat, embedding)  # (B * T, C)
            nats = -log_probs.gather(1, self._column(targets).unsqueeze(1)).squeeze(1)
            nats = self._with_tails(nats, flat, targets, embedding, counts)
            return nats, log_probs.view(*targets.shape, -1)

    def first_level(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Log-probabilities of the first band's words, then of the clusters; with no cutoffs, of all words.

        (..., d) -> (..., C) float32 (float64 for float64 input).
        """
        with no_autocast(hidden.device):
            top, head = self._top(self._wide(hidden)), self._head(embedding)
            logits = [F.linear(top, *piece) for piece in zip(head[::2], head[1::2], strict=True)]
            return torch.cat(logits, dim=-1).log_softmax(dim=-1)

    def log_probs(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Log-probability of every word: (..., d) -> (..., V) float32 (float64 for float64 input)."""
        with no_autocast(hidden.device):
            flat = self._wide(hidden).reshape(-1, hidden.shape[-1])
            head_log_probs, first = self.first_level(flat, embedding), self.ends[0]
            parts = [head_log_probs[:, :first]]
            for tail in range(self.tails):
                narrow = self._narrow(flat, tail, embedding)
                within = F.linear(narrow, *self._tail(tail, embedding)).log_softmax(dim=1)
                parts.append(head_log_probs[:, first + tail, None] + within)
            return torch.cat(parts, dim=1).view(*hidden.shape[:-1], self.ends[-1])

    def _column(self, targets: Tensor) -> Tensor:
        """(R,) where the first level has each target: its word, or its band's cluster."""
        words = targets.reshape(-1)
        column = words.clamp(min=0)
        for tail in range(self.tails):
            column = torch.where(words >= self.ends[tail], self.ends[0] + tail, column)
        return column

    def _with_tails(
        self,
        nats: Tensor,
        flat: Tensor,
        targets: Tensor,
        embedding: AdaptiveEmbedding,
        counts: Sequence[int] | None,
    ) -> Tensor:
        """(R,) nats of the first level and (R, d) hidden vectors -> (B, T) nats of the targets."""
        words = targets.reshape(-1)
        for tail, count in enumerate(counts or [None] * self.tails):
            low, last = self.ends[tail], tail == self.tails - 1
            inside = (words >= low) & (last | (words < self.ends[tail + 1]))
            place = places(inside, count)  # beyond the vocabulary: the last band raises
            narrow = self._narrow(flat[place], tail, embedding)  # no rows: a gradient of zeros
            within = linear_nats(narrow, words[place] - low, *self._tail(tail, embedding))
            nats = nats.index_add(0, place, within)
        return nats.view(targets.shape).masked_fill(targets < 0, 0.0)

    def _top(self, flat: Tensor) -> Tensor:
        """(..., d) inputs of the head's linear map."""
        return flat @ self._wide(self.head_projection) if self.tails else flat

    def _head(self, embedding: AdaptiveEmbedding) -> list[Tensor]:
        """Weight and bias of the first band, then of the clusters where there are any."""
        pieces: list[Tensor] = [embedding.tables[0], self.biases[0]]
        if self.tails:
            pieces += [self.cluster_weight, self.cluster_bias]
        return [self._wide(piece) for piece in pieces]

    def _tail(self, tail: int, embedding: AdaptiveEmbedding) -> tuple[Tensor, Tensor]:
        """Weight and bias of the words of a further band."""
        return self._wide(embedding.tables[tail + 1]), self._wide(self.biases[tail + 1])

    def _narrow(self, flat: Tensor, tail: int, embedding: AdaptiveEmbedding) -> Tensor:
        """(R, d) -> (R, width of the tail's band)."""
        return flat @ self._wide(embedding.projections[tail + 1]).t()

    @staticmethod
    def _wide(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()
