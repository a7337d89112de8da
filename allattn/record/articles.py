"""Nats by article as they are kept beside a result: {split: {unit, nats, tokens}}."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from allattn.training.scoring import Score
from allattn.training.tally import ByArticle


def articles_record(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Plain values of the scores, by split; floats keep every bit."""
    return {split: _plain(score.articles) for split, score in scores.items()}


def articles_from_record(record: Mapping[str, Any]) -> dict[str, ByArticle]:
    """The other way round.

    Raises:
        KeyError, TypeError, ValueError: it is no such record.
    """
    return {
        split: ByArticle(
            str(entry["unit"]), np.array(entry["nats"], np.float64), np.array(entry["tokens"], np.int64)
        )
        for split, entry in record.items()
    }


def _plain(articles: ByArticle) -> dict[str, Any]:
    return {"unit": articles.unit, "nats": articles.nats.tolist(), "tokens": articles.tokens.tolist()}
