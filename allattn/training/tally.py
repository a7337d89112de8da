"""Nats by article, and of unseen words, added up while a text is scored."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from allattn.data.encoded import EncodedSplit
from allattn.data.segments import Segment

BLOCK = 1_000  # tokens of a block, where a text has no articles


@dataclass(frozen=True)
class ByArticle:
    """What was scored of each article, or of each block of 1,000 tokens where the text has no titles.

    What stands before the first title belongs to the first article.
    """

    unit: str  # articles, or blocks of 1,000 tokens
    nats: npt.NDArray[np.float64]  # (a,)
    tokens: npt.NDArray[np.int64]  # (a,)


NO_ARTICLES = ByArticle("articles", np.zeros(0), np.zeros(0, np.int64))  # where sums were not asked for


class Tally:
    """Sums over the tokens scored so far.

    Args:
        split: the text that is scored.

    Attributes:
        nats: (a,) float64, by article.
        tokens: (a,) int64, by article.
        unseen_nats: of tokens whose word the vocabulary lacks.
        unseen_tokens: how many those are.
    """

    def __init__(self, split: EncodedSplit) -> None:
        self._unseen = split.unseen
        self._unit = "articles" if len(split.articles) else f"blocks of {BLOCK:,} tokens"
        self._begins = np.arange(0, len(split.ids), BLOCK)
        if len(split.articles):
            self._begins = np.array([0, *split.articles[1:]])
        self.nats = np.zeros(len(self._begins))
        self.tokens = np.zeros(len(self._begins), np.int64)
        self.unseen_nats, self.unseen_tokens = 0.0, 0

    def add(self, segment: Segment, losses: Tensor) -> None:
        """Add one segment.

        Args:
            segment: of the text; it says where its targets stand.
            losses: (b, T) nats of its targets, on any device.
        """
        assert segment.first is not None
        scored = segment.targets.numpy() >= 0
        places = (segment.first.numpy()[:, None] + np.arange(scored.shape[1]))[scored]  # (n,)
        nats = losses.cpu().double().numpy()[scored]  # (n,)
        article = np.searchsorted(self._begins, places, "right") - 1
        self.nats += np.bincount(article, nats, len(self._begins))
        self.tokens += np.bincount(article, minlength=len(self._begins))
        unseen = np.searchsorted(self._unseen, places, "right") > np.searchsorted(self._unseen, places)
        self.unseen_nats += float(nats[unseen].sum())
        self.unseen_tokens += int(unseen.sum())

    @property
    def articles(self) -> ByArticle:
        """The sums by article."""
        return ByArticle(self._unit, self.nats, self.tokens)
