"""All measurements, as one plain record of raw repetitions. Seconds are [measure][precision][name]."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from allattn.benchmark.arithmetic import forward_products
from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.memory import peak_bytes
from allattn.benchmark.product_rate import Action, product_actions, product_record
from allattn.benchmark.subject import (
    PRECISIONS,
    Subject,
    Variant,
    layers_only,
    new_model,
    text,
    variants,
    with_heads,
)
from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.record.timing import in_turn
from allattn.training.environment import device_name

Subjects = dict[tuple[str, str], Subject]  # by precision and name
Key = tuple[str, str, str]  # measure, precision, name
WHOLE = ["training_step", "evaluation", "layers_training", "layers_inference"]
PARTS = ["core_training", "softmax_training", "embedding_training", "update", "data"]


def measure(config: BenchmarkConfig, pruned: AllAttentionLM | None, device: torch.device) -> dict[str, Any]:
    """Measure everything on this machine.

    Args:
        config: what to measure.
        pruned: a model to compare with the dense one of its sizes; None = one with `config.heads`.
        device: where.
    """
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda: {"machine": _machine(device), "tokens_per_step": config.batch_size * config.segment_length},
        lambda: {"multiply_adds": _multiply_adds(config)},
        lambda: _steps_and_products(config, device),
        lambda: {
            "peak_bytes": _peaks(
                config, {(v.precision, v.name): (config.model, v) for v in variants(compiled=False)}, device
            )
        },
        lambda: {"one_layer": {"heads": config.model.heads, "seconds": _one_layer(config, device)}},
        lambda: {"pruned": _pruned(config, pruned, device)},
    ]
    record: dict[str, Any] = {}
    for part in track(parts, "measuring", console=Console(stderr=True)):
        record |= part()
    return record


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
    }


def _multiply_adds(config: BenchmarkConfig) -> dict[str, int]:
    segment = text(config, config.model).micro_batch(0)
    forward = forward_products(config.model, segment.inputs, segment.targets)
    names = ("core", "projections", "feed_forward", "softmax", "embedding")
    parts = {name: getattr(forward, name) for name in names}
    return {**parts, "layers": forward.layers, "total": forward.total}


def _steps_and_products(config: BenchmarkConfig, device: torch.device) -> dict[str, Any]:
    """Products take their turn among the steps, as the rate drifts where a machine is shared."""
    model = new_model(config.model, config.seed)
    subjects = {(v.precision, v.name): Subject(model, config, v, device) for v in variants(config.compile)}
    products = {("product", *key): action for key, action in product_actions(config, device).items()}
    seconds = in_turn({**products, **_actions(subjects, WHOLE + PARTS)}, config.repeats, device)
    of_products = {
        (precision, name): seconds.pop(("product", precision, name)) for _, precision, name in products
    }
    return {"products": product_record(config, of_products), "steps": _nested(seconds)}


def _peaks(
    config: BenchmarkConfig,
    models: dict[tuple[str, str], tuple[ModelConfig, Variant]],
    device: torch.device,
) -> dict[str, Any]:
    """[action][precision][name], each in a process of its own."""
    found: dict[str, Any] = {}
    for action in ("training_step", "evaluation") if config.peak_memory else ():
        by_precision = found.setdefault(action, {precision: {} for precision in PRECISIONS})
        for (precision, name), (model, variant) in models.items():
            sizes = replace(config, model=model)
            by_precision[precision][name] = peak_bytes(sizes, variant, action, device)
    return found


def _one_layer(config: BenchmarkConfig, device: torch.device) -> dict[str, Any]:
    """A layer with all, three quarters, half and a quarter of its heads."""
    heads = config.model.heads
    subjects = {}
    for kept in sorted({heads, heads * 3 // 4, heads // 2, heads // 4} - {0}, reverse=True):
        model = new_model(with_heads(layers_only(config.model), [kept]), config.seed)
        for precision in PRECISIONS:
            subjects[precision, str(kept)] = Subject(model, config, Variant("ours", precision), device)
    return _seconds(subjects, ["layers_training", "layers_inference"], config, device)


def _pruned(config: BenchmarkConfig, pruned: AllAttentionLM | None, device: torch.device) -> dict[str, Any]:
    if pruned is None:
        pruned = new_model(with_heads(config.model, config.heads), config.seed)
    sizes: ModelConfig = pruned.config
    dense = new_model(replace(sizes, heads_kept=None, output_scale=None, scale_absorbed=False), config.seed)
    models = {
        (precision, name): (model, Variant("ours", precision))
        for precision in PRECISIONS
        for name, model in (("dense", dense), ("pruned", pruned))
    }
    subjects = {key: Subject(model, config, variant, device) for key, (model, variant) in models.items()}
    in_float32 = {key: subject for key, subject in subjects.items() if key[0] == "float32"}
    return {
        "heads": sizes.heads,
        "heads_kept": sizes.heads_present,
        "seconds": {
            **_seconds(subjects, [*WHOLE, "teacher_forward"], config, device),
            **_seconds(in_float32, ["generated_token"], config, device),
        },
        "peak_bytes": _peaks(config, {key: (m.config, v) for key, (m, v) in models.items()}, device),
    }


def _seconds(
    subjects: Subjects, measures: list[str], config: BenchmarkConfig, device: torch.device
) -> dict[str, Any]:
    return _nested(in_turn(_actions(subjects, measures), config.repeats, device))


def _actions(subjects: Subjects, measures: list[str]) -> dict[Key, Action]:
    return {(what, *key): getattr(subject, what) for what in measures for key, subject in subjects.items()}


def _nested(seconds: dict[Key, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (what, precision, name), taken in seconds.items():
        found.setdefault(what, {}).setdefault(precision, {})[name] = taken
    return found
