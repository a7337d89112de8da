"""One record per run (result.json) and the short table at a command's end. Nothing in it is typed by hand."""

from typing import Any

from rich.console import Console
from rich.table import Table

from allattn.data.corpus import Corpus
from allattn.model.counts import count_parameters, multiply_adds, parameters_per_head
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import sparsity
from allattn.training.scoring import Score


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Tokens of each split, vocabulary, and what identifies both."""
    return {
        "tokens": {name: split.tokens for name, split in corpus.splits.items()},
        "vocabulary_size": corpus.vocabulary_size,
        "vocabulary_hash": corpus.tokenizer_hash,
        "data_fingerprint": corpus.fingerprint,
    }


def model_record(model: AllAttentionLM, scores: dict[str, Score]) -> dict[str, Any]:
    """Parameters, heads, multiply-adds and scores of one model."""
    config, counts = model.config, count_parameters(model)
    kept = [config.kept(layer) for layer in range(config.layers)]
    return {
        "parameters": {
            "layers": counts.layers,
            "embedding_side": counts.embedding_side,
            "total": counts.total,
            "per_head": parameters_per_head(config),
        },
        "heads_kept": kept,
        "heads_kept_total": sum(map(len, kept)),
        "heads_total": config.layers * config.heads,
        "sparsity": sparsity(config),
        "multiply_adds_per_token_layers": multiply_adds(config),
        **{split: score_record(score) for split, score in scores.items()},
    }


def score_record(score: Score) -> dict[str, Any]:
    """Perplexity per token and per word, nats and bits per token, and how many were scored."""
    return {
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "nats_per_token": score.loss,
        "bits_per_token": score.bits,
        "tokens_scored": score.tokens,
        "words_scored": score.words,
    }


def print_summary(title: str, corpus: dict[str, Any], models: dict[str, dict[str, Any]]) -> None:
    """A table with one column per model (dense, pruned)."""
    table = Table(title=title)
    table.add_column("")
    for name in models:
        table.add_column(name, justify="right")
    records = list(models.values())
    tokens = " / ".join(f"{n:,}" for n in corpus["tokens"].values())
    table.add_row("tokens train / valid / test", *[tokens] * len(records))
    table.add_row("vocabulary", *[f"{corpus['vocabulary_size']:,}"] * len(records))
    table.add_row("parameters, layers", *[f"{r['parameters']['layers']:,}" for r in records])
    table.add_row("parameters, embedding side", *[f"{r['parameters']['embedding_side']:,}" for r in records])
    table.add_row("heads kept", *[f"{r['heads_kept_total']} of {r['heads_total']}" for r in records])
    table.add_row("sparsity", *[f"{r['sparsity']:.1%}" for r in records])
    for split in ("valid", "test"):
        table.add_row(f"perplexity, {split}", *[f"{r[split]['perplexity']:.2f}" for r in records])
        if records[0][split]["words_scored"] != records[0][split]["tokens_scored"]:
            row = [f"{r[split]['word_perplexity']:.2f}" for r in records]
            table.add_row(f"perplexity per word, {split}", *row)
        table.add_row(f"tokens scored, {split}", *[f"{r[split]['tokens_scored']:,}" for r in records])
    if all("layer_microseconds_per_token" in r for r in records):
        row = [f"{r['layer_microseconds_per_token']:.1f} µs" for r in records]
        table.add_row("layers' time per token", *row)
    Console().print(table)
    cut = records[-1]["heads_kept"]
    if records[-1]["heads_kept_total"] < records[-1]["heads_total"]:
        Console().print(heads_table(cut))


def heads_table(heads_kept: list[list[int]]) -> Table:
    """Heads kept per layer, by their original indices."""
    table = Table(title="heads kept per layer")
    table.add_column("layer", justify="right")
    table.add_column("heads", justify="right")
    table.add_column("original indices")
    for layer, heads in enumerate(heads_kept):
        table.add_row(str(layer), str(len(heads)), " ".join(map(str, heads)) or "none")
    return table
