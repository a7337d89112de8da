"""What a study looks at: a model, two texts, and perhaps tasks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from allattn.head_study.texts import Text
from allattn.heads.watched import HeadModel, Visitor
from allattn.training.display import watched


@dataclass(frozen=True)
class Subject:
    """A model and what it reads."""

    name: str
    model: HeadModel
    calibration: Text
    test: Text
    run_tasks: Callable[[Visitor], Mapping[str, float]]  # "task metric" -> number, through a mask
    identity: Mapping[str, Any]  # of the weights: what every measurement depends on
    several_kinds: bool = False  # of keys: memory, persistent vectors too

    @property
    def heads(self) -> list[int]:
        """Of each layer."""
        return [layer.heads for layer in self.model.layers]


def score_text(
    model: HeadModel, text: Text, what: str = "scoring", progress: bool = False
) -> tuple[float, int]:
    """Nats of all tokens of a text, and how many these are.

    Args:
        model: perhaps watched.
        text: to score.
        what: is done, for the bar.
        progress: show one on standard error.
    """
    nats, tokens, memory = 0.0, 0, None
    with torch.no_grad():
        for batch in watched(text.batches(), what, progress):
            losses, after = model.nats(batch, memory)
            memory = after if text.memory else None
            nats += float(losses.double().sum())
            tokens += int((batch.targets >= 0).sum())
    return nats, tokens
