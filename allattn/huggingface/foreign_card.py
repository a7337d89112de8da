"""What a removal of heads from a model of others changed, measured, and the model card that says so."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2 import Environment, StrictUndefined

from allattn.head_study.subject import score_text
from allattn.head_study.texts import Text
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.removal import cache_bytes_per_token
from allattn.record.timing import in_turn
from allattn.training.environment import device_name
from allattn.training.model_card import CardLabels

REPEATS = 3
_TEMPLATE = Path(__file__).with_name("foreign_card.md.jinja")


@dataclass(frozen=True)
class Measured:
    """One model."""

    groups: int  # key/value heads of all layers
    parameters: int
    bytes: int
    cache_bytes: int  # of keys and values per token
    tokens_per_second: float
    perplexity: float
    word_perplexity: float


def measure(
    models: Mapping[str, ForeignModel], test: Text, words: int, progress: bool
) -> dict[str, Measured]:
    """Sizes, speed in turn, and perplexity of models of the same tokens, by name.

    Args:
        models: on the same device.
        test: the text to score; its first batch is what the speed is measured on.
        words: that its scored tokens spell.
        progress: show bars on standard error.
    """
    batch = next(iter(test.batches()))
    tokens = int(batch.real.sum())
    with torch.no_grad():
        actions = {name: (lambda model=model: model.nats(batch)) for name, model in models.items()}
        seconds = in_turn(actions, REPEATS, next(iter(models.values())).device)
    found = {}
    for name, model in models.items():
        nats, scored = score_text(model, test, f"perplexity {name}", progress)
        weights = list(model.model.parameters())
        found[name] = Measured(
            groups=sum(layer.groups for layer in model.layers),
            parameters=sum(weight.numel() for weight in weights),
            bytes=sum(weight.nbytes for weight in weights),
            cache_bytes=cache_bytes_per_token(model),
            tokens_per_second=tokens / statistics.median(seconds[name]),
            perplexity=_exp(nats / scored),
            word_perplexity=_exp(nats / words),
        )
    return found


def how_fast(model: ForeignModel, test: Text) -> str:
    """What the speed was measured on."""
    batch = next(iter(test.batches()))
    (rows, length), dtype = batch.ids.shape, str(model.model.dtype).removeprefix("torch.")
    return (
        f"median of {REPEATS} forward passes of {rows} windows of {length} tokens, softmax included, both "
        f"models in turn, on {device_name(model.device)} with {torch.get_num_threads()} threads, {dtype}"
    )


def foreign_card(name: str, source: str, labels: CardLabels, facts: Mapping[str, Any]) -> str:
    """The README.md of a model without some of its heads.

    Args:
        name: of the model.
        source: what it was made of: a name of the hub, or of a folder.
        labels: what the owner says.
        facts: what the page shows.
    """
    metadata: dict[str, Any] = {"license": labels.license}
    if labels.language is not None:
        metadata["language"] = labels.language
    if "/" in source:
        metadata["base_model"] = source
    metadata |= {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["allattn", "pruning"],
    }
    page = Environment(undefined=StrictUndefined, trim_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    body = page.render(name=name, source=source, **facts)
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n{body}\n"


def original_heads(model: ForeignModel, closed: Sequence[Sequence[int]]) -> list[list[int]]:
    """Places among the heads present as indices in the dense model."""
    kept = getattr(model.config, "heads_kept", None)
    return [
        list(layer) if kept is None else [kept[i][head] for head in layer] for i, layer in enumerate(closed)
    ]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
