"""The short table of results at a stage's end."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_result(title: str, corpus: dict[str, Any], models: dict[str, dict[str, Any]]) -> None:
    """A table with one column per model (dense, pruned)."""
    table = Table(title=title)
    table.add_column("")
    for name in models:
        table.add_column(name, justify="right")
    records = list(models.values())
    tokens = " / ".join(f"{n:,}" for n in corpus["tokens"].values())
    table.add_row("tokens train / valid / test", *[tokens] * len(records))
    table.add_row("vocabulary", *[f"{corpus['vocabulary_size']:,}"] * len(records))
    unseen = " / ".join(f"{split['share']:.1%}" for split in corpus["unseen_words"].values())
    table.add_row("unseen words, read as <unk>", *[unseen] * len(records))
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
