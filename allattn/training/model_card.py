"""The README.md of an exported model: a model card, as the Hugging Face hub reads it.

It says what the export knows of itself and nothing else. Paths of the training text stay at home.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from allattn.model.counts import count_parameters
from allattn.model.gated import GatedLM
from allattn.model.language_model import AllAttentionLM


@dataclass(frozen=True)
class CardLabels:
    """What only the owner of a model can say."""

    license: str = "unknown"  # an identifier of the hub, such as apache-2.0 or cc-by-sa-4.0
    language: str | None = None  # ISO 639-1; None = that of the text where it is a known one


@dataclass(frozen=True)
class _Text:
    """A corpus as the card names it."""

    name: str
    hub: str | None = None  # its name on the hub
    language: str | None = None


_TEXTS = {
    "wikitext103": _Text("WikiText-103", "Salesforce/wikitext", "en"),
    "wikitext2": _Text("WikiText-2", "Salesforce/wikitext", "en"),
    "wikitext103_raw": _Text("WikiText-103 (raw)", "Salesforce/wikitext", "en"),
    "wikitext2_raw": _Text("WikiText-2 (raw)", "Salesforce/wikitext", "en"),
    "pydoc": _Text("Python's own documentation", None, "en"),
}
_OTHER_TEXT = _Text("local text files")

_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def model_card(
    name: str,
    model: AllAttentionLM,
    data: dict[str, Any],
    record: dict[str, Any] | None,
    labels: CardLabels,
) -> str:
    """The card of a model.

    Args:
        name: of the model.
        model: as exported.
        data: what the checkpoint says of its text.
        record: of the model in result.json, with `evaluation`, `valid`, `test`; None = it was not scored.
        labels: what the owner says.
    """
    sizes, now = model.config, count_parameters(model).total
    text = _TEXTS.get(str(data.get("source")), _OTHER_TEXT)
    scored = record or {}
    scores: dict[str, Any] = {split: scored[split] for split in ("valid", "test") if split in scored}
    persistent = "Persistent vectors: Sukhbaatar et al., arXiv:1907.01470."
    page = Environment(undefined=StrictUndefined, trim_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    body = page.render(
        name=name,
        family=sizes.family[0].upper() + sizes.family[1:],
        sizes=sizes,
        text=text,
        removed=sizes.heads_kept_total < sizes.heads_total,
        parameters=now,
        parameters_dense=now + (sizes.heads_total - sizes.heads_kept_total) * sizes.parameters_per_head,
        scores=scores,
        how=scored.get("evaluation", {}),
        architecture_source=persistent if sizes.persistent_vectors else "Transformer-XL: arXiv:1901.02860.",
    )
    metadata = _metadata(name, text, scores, labels)
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def result_of(checkpoint: Path) -> dict[str, Any] | None:
    """What the checkpoint's run folder says of its last checkpoint."""
    if checkpoint.name != "last.ckpt":
        return None
    try:
        result = json.loads((checkpoint.parent.parent / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def record_in(result: dict[str, Any] | None, model: GatedLM, meta: dict[str, Any]) -> dict[str, Any] | None:
    """The model's record in a result; None where the result is of another model or step."""
    try:
        assert result is not None
        record: dict[str, Any] = result["pruned" if "pruned" in result else "dense"]
        kept = [model.config.kept(layer) for layer in range(model.config.layers)]
        fits = (record["heads_kept"], result["steps"]) == (kept, meta["step"])
        fits &= result["corpus"]["vocabulary_hash"] == meta["tokenizer_hash"]
        fits &= {"word_perplexity", "perplexity", "tokens_scored"} <= record["test"].keys()
        return record if fits and isinstance(record["evaluation"], dict) else None
    except (AssertionError, LookupError, TypeError, AttributeError):
        return None


def _metadata(name: str, text: _Text, scores: dict[str, Any], labels: CardLabels) -> dict[str, Any]:
    language = labels.language or text.language
    metadata: dict[str, Any] = {"license": labels.license}
    if language is not None:
        metadata["language"] = language
    if text.hub is not None:
        metadata["datasets"] = [text.hub]
    metadata |= {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["allattn", "pruning"],
    }
    if scores:
        metadata["metrics"] = ["perplexity"]
        results = [
            {
                "task": {"type": "text-generation"},
                "dataset": {"name": text.name, "type": text.hub or "text", "split": split},
                "metrics": [
                    {
                        "type": "perplexity",
                        "name": f"perplexity per {unit}",
                        "value": round(score[key], 4),
                    }
                    for unit, key in (("word", "word_perplexity"), ("token", "perplexity"))
                ],
            }
            for split, score in scores.items()
        ]
        metadata["model-index"] = [{"name": name, "results": results}]
    return metadata
