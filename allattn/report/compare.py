"""Pruning runs side by side: mean and spread over seeds, differences paired by seed, the paper's too."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Shim et al., WikiText-103 test perplexity: difference from the full method (method.md, Published numbers).
PAPER_DIFFERENCES = {
    "all_three": 0.0,
    "no_lambda_warmup": 0.12,
    "no_positive_init": 0.61,
    "no_output_scaling": 1.25,
    "none_of_three": 1.48,
}
FULL = "all_three"
_ORDER = [*PAPER_DIFFERENCES, "random", "magnitude", "gradient"]

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = [math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]


@dataclass(frozen=True)
class Run:
    """One finished pruning run."""

    folder: Path
    variant: str
    seed: int
    sparsity: float
    parameters: int  # of the layers
    perplexity: float  # of the test split
    comparable: tuple[Any, ...]  # runs that differ in this do not belong into one ranking


@dataclass(frozen=True)
class Row:
    """One variant over its seeds."""

    variant: str
    seeds: list[int]
    sparsity: float
    parameters: float
    perplexity: float
    spread: float  # standard deviation over seeds; NaN for one seed
    difference: float  # from the full method, paired by seed; NaN without common seeds
    interval: float  # half width of the difference's 95 % interval (Student's t); NaN for one pair
    paper: float | None


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """Finished pruning runs below the folders, and run folders without a result that can be read."""
    runs, unfinished = [], []
    for config in sorted({path for folder in folders for path in folder.rglob("config.yaml")}):
        result = config.with_name("result.json")
        if not result.exists():
            unfinished.append(config.parent)
            continue
        try:
            record = json.loads(result.read_text())
            if record["stage"] == "prune":
                runs.append(_run(config.parent, record))
        except (ValueError, KeyError, TypeError):
            unfinished.append(config.parent)
    return runs, unfinished


def _run(folder: Path, record: dict[str, Any]) -> Run:
    selection, target, pruned = record["selection"], record["target_sparsity"], record["pruned"]
    variant = record["ablation"] if selection == "l0" else f"{selection}, {record['scope']}"
    if target is not None and selection == "l0":
        variant += f", target {target:g}"
    corpus = record["corpus"]
    comparable = (corpus["vocabulary_hash"], corpus["data_fingerprint"], pruned["test"]["tokens_scored"])
    return Run(
        folder,
        variant,
        record["seed"],
        pruned["sparsity"],
        pruned["parameters"]["layers"],
        pruned["test"]["perplexity"],
        comparable,
    )


def compare(runs: list[Run]) -> list[Row]:
    """One row per variant, the full method first.

    Runs of one variant and seed must be one; runs on other texts or vocabularies must be compared apart.
    """
    full = {run.seed: run.perplexity for run in runs if run.variant == FULL}
    rows = []
    for variant in sorted({run.variant for run in runs}, key=_rank):
        own = sorted((run for run in runs if run.variant == variant), key=lambda run: run.seed)
        values = [run.perplexity for run in own]
        pairs = [run.perplexity - full[run.seed] for run in own if run.seed in full]
        rows.append(
            Row(
                variant,
                [run.seed for run in own],
                statistics.mean(run.sparsity for run in own),
                statistics.mean(run.parameters for run in own),
                statistics.mean(values),
                statistics.stdev(values) if len(values) > 1 else math.nan,
                statistics.mean(pairs) if pairs else math.nan,
                _half_width(pairs),
                PAPER_DIFFERENCES.get(variant),
            )
        )
    return rows


def _rank(variant: str) -> tuple[int, str]:
    first = variant.split(",")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER), variant)


def _half_width(pairs: list[float]) -> float:
    count = len(pairs)
    if count < 2:
        return math.nan
    quantile = _T95[count - 1] if count - 1 < len(_T95) else 1.96
    return quantile * statistics.stdev(pairs) / math.sqrt(count)


def markdown(rows: list[Row]) -> str:
    """The comparison as a Markdown table."""
    head = "| variant | seeds | sparsity | layer parameters | test perplexity | difference (95 %) | paper |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        spread = "" if math.isnan(row.spread) else f" ± {row.spread:.2f}"
        paper = "" if row.paper is None else f"{row.paper:+.2f}"
        lines.append(
            f"| {row.variant} | {', '.join(map(str, row.seeds))} | {row.sparsity:.1%} "
            f"| {row.parameters:,.0f} | {row.perplexity:.2f}{spread} | {_difference(row)} | {paper} |"
        )
    return "\n".join(lines)


def _difference(row: Row) -> str:
    if row.variant == FULL or math.isnan(row.difference):
        return ""
    half = "" if math.isnan(row.interval) else f" ± {row.interval:.2f}"
    return f"{row.difference:+.2f}{half}"
