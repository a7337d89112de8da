"""Made-up pruning runs: records in the form that the stages write, with numbers chosen by the test."""

import copy
import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

LAYERS, HEADS = 4, 4
PER_HEAD = 2_304
EMBEDDING = 50_000
DENSE_LAYERS = LAYERS * HEADS * PER_HEAD + 1_000
OFF = {
    "full": {},
    "warm-up": {"gates.lambda_warmup_steps": 0},
    "init": {"gates.initial_pi": 0.0},
    "scaling": {"gates.output_scaling": False},
    "three": {"gates.lambda_warmup_steps": 0, "gates.initial_pi": 0.0, "gates.output_scaling": False},
}
LABELS = {
    "full": "all_three",
    "warm-up": "no_lambda_warmup",
    "init": "no_positive_init",
    "scaling": "no_output_scaling",
    "three": "none_of_three",
}

_CONFIG: dict[str, Any] = {
    "name": "run",
    "runs_folder": "runs",
    "seed": 1,
    "resume": "auto",
    "data": {"source": "checkpoint", "tokenizer": "word", "cache_folder": "~/.cache/allattn"},
    "optimizer": {"name": "lamb", "learning_rate": 0.001, "betas": [0.9, 0.999]},
    "schedule": {"batch_size": 16, "segment_length": 64, "steps": 400},
    "eval": {"mode": "memory", "interval": 100},
    "trainer": {"precision": "32-true", "devices": 1, "progress": False},
    "logger": {"wandb": "none", "project": "allattn", "entity": None, "group": "study", "tags": []},
    "checkpoint": "runs/dense/checkpoints/last.ckpt",
    "ablation": "all_three",
    "gates": {
        "lambda_max": 0.02,
        "lambda_warmup_steps": 75,
        "freeze_step": 200,
        "initial_pi": 2.0,
        "output_scaling": True,
        "scale_gradient": False,
        "beta": 1 / 3,
        "target_sparsity": None,
        "target_gain": 5.0,
        "selection": "l0",
        "scope": "all_layers",
    },
}


def config(name: str = "run", seed: int = 1, **changes: Any) -> dict[str, Any]:
    """A run's settings; `a.b` = value changes one (given as keyword arguments by **{...})."""
    values = copy.deepcopy(_CONFIG) | {"name": name, "seed": seed}
    for dotted, value in changes.items():
        *groups, last = dotted.split(".")
        target = values
        for group in groups:
            target = target.setdefault(group, {})
        target[last] = value
    return values


def result(
    perplexity: float,
    kept: int = 12,
    dense: float = 100.0,
    family: str = "All-attention",
    size: int = DENSE_LAYERS,
    microseconds: float | None = None,
    **text: Any,
) -> dict[str, Any]:
    """A run's result; `kept` of 16 heads stay, the first layers lose theirs first.

    `size` is the dense layers' parameters; a head takes `microseconds` per token.
    """
    gone = LAYERS * HEADS - kept
    layers = [max(0, HEADS - max(0, gone - HEADS * layer)) for layer in range(LAYERS)]
    corpus = {"vocabulary_hash": "v" * 64, "data_fingerprint": "f" * 64, "vocabulary_size": 500}
    corpus |= {name: value for name, value in text.items() if name in corpus}
    tokens = text.get("tokens_scored", 999)

    def model(value: float, heads: list[int]) -> dict[str, Any]:
        parameters = size - (LAYERS * HEADS - sum(heads)) * PER_HEAD
        timed = {} if microseconds is None else {"layer_microseconds_per_token": microseconds * sum(heads)}
        return timed | {
            "family": family,
            "parameters": {
                "layers": parameters,
                "embedding_side": EMBEDDING,
                "total": parameters + EMBEDDING,
            },
            "heads_kept": [list(range(count)) for count in heads],
            "heads_kept_total": sum(heads),
            "heads_total": LAYERS * HEADS,
            "sparsity": 1 - sum(heads) / (LAYERS * HEADS),
            "test": {"perplexity": value, "tokens_scored": tokens},
        }

    return {
        "stage": "prune",
        "steps": 400,
        "corpus": corpus,
        "dense": model(dense, [HEADS] * LAYERS),
        "pruned": model(perplexity, layers),
        "environment": {"git_revision": "abc", "versions": {"torch": "2.9.0"}},
    }


def dense_run(perplexity: float, seed: int = 1, **about: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and result of a pretraining run; `about` as `result` takes it."""
    settings = config("dense", seed) | {"model": {"layers": LAYERS}}
    record = result(1, dense=perplexity, **about) | {"stage": "pretrain", "steps": 1_600}
    return {name: value for name, value in settings.items() if name != "gates"}, {
        name: value for name, value in record.items() if name != "pruned"
    }


def history(perplexity: float = 120.0, freeze: int = 200, steps: int = 400) -> list[dict[str, Any]]:
    """Rows of metrics: validation 5 below `perplexity` at step 300, 2 below it at the end."""
    rows: list[dict[str, Any]] = []
    for step in range(20, steps + 1, 20):
        row: dict[str, Any] = {"step": step, "loss": 5 - step / 1000}
        row["phase"] = "gates" if step <= freeze else "fine_tune"
        if step <= freeze:
            row["sparsity"] = 0.25 * step / freeze
            row["s_g/layer_00"] = 1.25
        if step % 100 == 0:
            row["valid_loss"] = 5 - step / 1000
            row["valid_perplexity"] = {100: 1.0, 200: perplexity, 300: perplexity - 5}.get(
                step, perplexity - 2
            )
        rows.append(row)
    return rows


def articles(perplexity: float, seed: int, count: int = 40) -> dict[str, Any]:
    """Nats by article of a pruned model: noise of the text, and of the model, around the perplexity's."""
    text, own = random.Random(0), random.Random(f"{perplexity} {seed}")
    tokens = [text.randint(5, 50) for _ in range(count)]
    nats = [n * (math.log(perplexity) + 0.3 * text.gauss(0, 1) + 0.02 * own.gauss(0, 1)) for n in tokens]
    return {"pruned": {"test": {"unit": "articles", "nats": nats, "tokens": tokens}}}


def write_run(
    folder: Path,
    settings: dict[str, Any],
    record: dict[str, Any] | None,
    rows: list[dict[str, Any]] | None,
    by_article: dict[str, Any] | None = None,
) -> Path:
    """A run folder; without `record` it is unfinished."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    if record is not None:
        (folder / "result.json").write_text(json.dumps(record))
    if by_article is not None:
        (folder / "articles.json").write_text(json.dumps(by_article))
    if rows is not None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
    return folder


def write_study(folder: Path, perplexities: dict[str, dict[int, float]], kept: int = 12) -> Path:
    """One run folder per variant (a key of OFF) and seed."""
    for variant, by_seed in perplexities.items():
        for seed, value in by_seed.items():
            name = f"{variant}-{seed}"
            settings = config(name, seed, **OFF[variant], ablation=LABELS[variant])
            write_run(folder / name, settings, result(value, kept), history(value))
    return folder
