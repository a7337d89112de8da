"""Which heads a model has, with their pi, and what that saves: as one record, as tables, and as a picture."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from allattn.errors import InputError
from allattn.families import sizes_from_dict, sizes_only
from allattn.files import write_atomically
from allattn.model.counts import count_parameters, multiply_adds
from allattn.model.gated import GatedLM
from allattn.pictures.drawing import png
from allattn.pictures.pi import draw_pi_and_kept
from allattn.pruning.surgery import sparsity
from allattn.training.checkpoints import has_gates
from allattn.training.cutting import at_freeze

PICTURE_ENDING = ".png"


def head_record(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Heads, parameters and multiply-adds of a checkpoint beside those of the dense model of its sizes.

    A checkpoint of the gate phase still has all its heads; its record is that of the model with the closed
    ones removed, and `heads_closed_by_gates` says how many those are.
    """
    gated = has_gates(checkpoint)
    present = sizes_from_dict(checkpoint["allattn"]["model"]).heads_kept_total
    if gated:
        checkpoint = at_freeze(checkpoint)
    meta = checkpoint["allattn"]
    config = sizes_from_dict(meta["model"])
    dense = config.dense()
    models = {"dense": sizes_only(dense), "pruned": sizes_only(config)}
    counts = {name: count_parameters(model) for name, model in models.items()}
    per_layer = [_layer_parameters(model) for model in models.values()]
    pi = _pi_by_head(meta)
    layers = [
        {
            "layer": layer,
            "heads_kept": config.kept(layer),
            "pi": [pi[layer].get(head) for head in range(config.heads)],
            "output_scale": config.scale(layer),
            "parameters": {"dense": per_layer[0][layer], "pruned": per_layer[1][layer]},
            "multiply_adds_per_token": {
                "dense": dense.layer_multiply_adds(layer),
                "pruned": config.layer_multiply_adds(layer),
            },
        }
        for layer in range(config.layers)
    ]
    return {
        "phase": "gates" if gated else meta["phase"],
        "step": meta["step"],
        "heads_total": config.heads_total,
        "heads_kept": config.heads_kept_total,
        "heads_removed": config.heads_total - present,
        "heads_closed_by_gates": present - config.heads_kept_total,
        "sparsity": sparsity(config),
        "parameters": {
            "layers": {name: count.layers for name, count in counts.items()},
            "per_head": config.parameters_per_head,
            "embedding_side": counts["pruned"].embedding_side,
            "total": {name: count.total for name, count in counts.items()},
        },
        "multiply_adds_per_token_layers": {"dense": multiply_adds(dense), "pruned": multiply_adds(config)},
        "layers": layers,
    }


def print_head_map(record: dict[str, Any], title: str) -> None:
    """The record as two tables."""
    per_layer = Table(title=title)
    for name in ("layer", "kept", "s_g", "parameters"):
        per_layer.add_column(name, justify="right")
    known = any(value is not None for layer in record["layers"] for value in layer["pi"])
    per_layer.add_column("heads kept, original index:pi" if known else "heads kept, original indices")
    for layer in record["layers"]:
        per_layer.add_row(
            str(layer["layer"]),
            str(len(layer["heads_kept"])),
            f"{layer['output_scale']:.3f}",
            f"{layer['parameters']['pruned']:,}",
            " ".join(_with_pi(head, layer["pi"][head]) for head in layer["heads_kept"]) or "none",
        )
    sums = Table()
    sums.add_column("")
    for name in ("dense", "pruned"):
        sums.add_column(name, justify="right")
    parameters, total = record["parameters"], record["heads_total"]
    sums.add_row("heads", str(total), f"{record['heads_kept']} of {total}")
    sums.add_row("sparsity (share of heads)", f"{0:.1%}", f"{record['sparsity']:.1%}")
    sums.add_row("parameters, layers", *_both(parameters["layers"]))
    sums.add_row("parameters, embedding side", *[f"{parameters['embedding_side']:,}"] * 2)
    sums.add_row("parameters, all", *_both(parameters["total"]))
    sums.add_row("parameters, one head", *[f"{parameters['per_head']:,}"] * 2)
    sums.add_row("multiply-adds per token, layers", *_both(record["multiply_adds_per_token_layers"]))
    console = Console()
    console.print(per_layer)
    console.print(sums)
    if record["phase"] == "gates":
        console.print(
            f"step {record['step']} of the gate phase: {record['heads_removed']} heads removed so far; "
            f"pruned = without the {record['heads_closed_by_gates']} heads that the gates close now"
        )


def draw_head_map(record: dict[str, Any], picture: Path, title: str) -> None:
    """The record as a picture, layers x heads: pi as colour where known, removed heads crossed out.

    Raises:
        InputError: the file's ending is not .png, or it cannot be written.
    """
    if picture.suffix != PICTURE_ENDING:
        raise InputError(f"picture={picture}: give a file name that ends in {PICTURE_ENDING}")
    layers = record["layers"]
    heads = range(len(layers[0]["pi"]))
    pi = [[math.nan if value is None else value for value in layer["pi"]] for layer in layers]
    kept = [[head in layer["heads_kept"] for head in heads] for layer in layers]
    image = png(draw_pi_and_kept(pi, kept, title))
    try:
        write_atomically(picture, image)
    except OSError as error:
        raise InputError(f"picture={picture}: cannot be written ({error.strerror})") from None


def _layer_parameters(model: GatedLM) -> list[int]:
    return [sum(p.numel() for p in layer.parameters()) for layer in model.layers]


def _pi_by_head(meta: dict[str, Any]) -> list[dict[int, float]]:
    """Per layer: original index -> pi of the heads that had a gate."""
    if "pi" not in meta:
        return [{} for _ in range(sizes_from_dict(meta["model"]).layers)]
    pairs = zip(meta["heads_before"], meta["pi"], strict=True)
    return [dict(zip(heads, values, strict=True)) for heads, values in pairs]


def _with_pi(head: int, pi: float | None) -> str:
    return str(head) if pi is None else f"{head}:{pi:+.2f}"


def _both(values: dict[str, int]) -> list[str]:
    return [f"{values[name]:,}" for name in ("dense", "pruned")]
