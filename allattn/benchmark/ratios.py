"""Medians and ratios from the raw record of `measure`; nothing is measured here."""

from statistics import median
from typing import Any

from allattn.benchmark.arithmetic import training_products

Record = dict[str, Any]


def summarize(record: Record) -> Record:
    """What the raw repetitions say: per precision and name."""
    counted = record["multiply_adds"]
    rates = {precision: _rates(products, counted) for precision, products in record["products"].items()}
    return {
        "rates": rates,
        "steps": _steps(record, rates),
        "parts": _parts(record["steps"]),
        "one_layer": _one_layer(record["one_layer"]),
        "pruned": _pruned(record["pruned"]),
    }


def medians(seconds: Record) -> Record:
    """Lists of seconds, at any depth, by their medians."""
    return {
        key: medians(value) if isinstance(value, dict) else median(value) for key, value in seconds.items()
    }


def _rates(products: list[Record], multiply_adds: Record) -> Record:
    """Rate of every product, the best one, and what the layers' training would reach if only products took
    time, none twice, at the rates of `product_shapes`.
    """
    by_name = {entry["name"]: entry["multiply_adds"] / median(entry["seconds"]) for entry in products}
    best = max(by_name, key=lambda name: by_name[name])
    found = {"by_name": by_name, "best": best, "multiply_adds_per_second": by_name[best]}
    core = ["scores", "values", "gradient of keys or values"]  # a third of the core's training each
    if all(name in by_name for name in core):
        seconds = 3 * (multiply_adds["projections"] + multiply_adds["feed_forward"]) / by_name["projection"]
        seconds += sum(multiply_adds["core"] / by_name[name] for name in core)
        found["products_alone"] = training_products(multiply_adds["layers"]) / seconds / by_name[best]
    return found


def _steps(record: Record, rates: Record) -> Record:
    time, peak = medians(record["steps"]), record["peak_bytes"]
    tokens, counted = record["tokens_per_step"], record["multiply_adds"]
    found: Record = {}
    for precision, names in time["training_step"].items():
        rate = rates[precision]["multiply_adds_per_second"]
        found[precision] = {}
        for name in names:
            row = {what: by_precision[precision][name] for what, by_precision in time.items()}
            found[precision][name] = {
                "tokens_per_second": {what: tokens / row[what] for what in ("training_step", "evaluation")},
                "faster": {
                    what: time[what][precision]["yardstick"] / row[what]
                    for what in ("training_step", "layers_training", "evaluation", "layers_inference")
                },
                "training_step_against_float32_yardstick": time["training_step"]["float32"]["yardstick"]
                / row["training_step"],
                "share_of_rate": {
                    "training_step": training_products(counted["total"]) / row["training_step"] / rate,
                    "layers_training": training_products(counted["layers"]) / row["layers_training"] / rate,
                    "layers_inference": counted["layers"] / row["layers_inference"] / rate,
                },
                "peak_bytes": {what: peaks[precision].get(name) for what, peaks in peak.items()},
                "peak_against_yardstick": {
                    what: _ratio(peaks[precision].get(name), peaks[precision]["yardstick"])
                    for what, peaks in peak.items()
                },
            }
    return found


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _parts(seconds: Record) -> Record:
    """Shares of a training step; `rest` is what the parts, timed by themselves, leave.

    A compiled layer has no part that could be timed.
    """
    time = medians(seconds)
    found: Record = {}
    for precision, names in time["training_step"].items():
        found[precision] = {}
        for name, whole in names.items():
            if name == "compiled":
                continue
            row = {what: by_precision[precision][name] for what, by_precision in time.items()}
            parts = {
                "attention core": row["core_training"],
                "projections and norms": row["layers_training"] - row["core_training"],
                "adaptive softmax": row["softmax_training"],
                "embedding": row["embedding_training"],
                "optimizer": row["update"],
                "data": row["data"],
            }
            shares = {part: taken / whole for part, taken in parts.items()}
            found[precision][name] = {**shares, "rest": 1 - sum(shares.values())}
    return found


def _one_layer(entry: Record) -> Record:
    """[measure][precision][heads]: time as a share of the dense layer's."""
    dense = str(entry["heads"])
    return {
        what: {
            precision: {kept: seconds / by_heads[dense] for kept, seconds in by_heads.items()}
            for precision, by_heads in by_precision.items()
        }
        for what, by_precision in medians(entry["seconds"]).items()
    }


def _pruned(entry: Record) -> Record:
    kept = entry["heads_kept"]
    time = medians(entry["seconds"])
    return {
        "heads_kept": sum(kept),
        "heads_total": entry["heads"] * len(kept),
        "share_kept": sum(kept) / (entry["heads"] * len(kept)),
        "seconds": time,
        "peak_bytes": entry["peak_bytes"],
        "against_dense": {
            what: {precision: names["pruned"] / names["dense"] for precision, names in by_precision.items()}
            for what, by_precision in time.items()
        },
    }
