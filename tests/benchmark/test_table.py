"""Ratios and tables of a record whose answers are known."""

from typing import Any

import pytest

from allattn.benchmark.ratios import summarize
from allattn.benchmark.table import markdown


def made_up() -> dict[str, Any]:
    """A record whose ratios can be read off: yardstick 4 s, ours 1 s in float32 and 0.5 s in bfloat16."""
    whole = ("training_step", "evaluation", "layers_training", "layers_inference")
    yardstick = {"float32": [9.0, 4.0, 1.0], "bfloat16": [1.0, 1.0, 8.0]}
    ours = {"float32": [1.0, 1.0, 3.0], "bfloat16": [0.5, 0.25, 0.75]}
    times = {p: {"yardstick": yardstick[p], "ours": ours[p]} for p in ours}
    part = {p: {"yardstick": [0.1], "ours": [0.1]} for p in ours}
    parts = ("core_training", "softmax_training", "embedding_training", "update", "data")
    peaks = {p: {"yardstick": 400 * 2**20, "ours": 100 * 2**20} for p in ours}
    one = {p: {"8": [2.0], "6": [1.5], "4": [1.2], "2": [0.5]} for p in ours}
    pair = {p: {"dense": [2.0], "pruned": [1.25]} for p in ours}
    of_a_layer = ("projection", "scores", "values", "gradient of keys or values")
    products: list[dict[str, Any]] = [
        {"name": name, "shape": [1, 2, 3], "multiply_adds": 4 * 10**9, "seconds": [1.0]}
        for name in of_a_layer
    ]
    return {
        "settings": {
            "batch_size": 4,
            "segment_length": 192,
            "repeats": 3,
            "model": {"layers": 4, "width": 512, "heads": 8, "persistent_vectors": 2048, "memory_length": 192}
            | {"vocabulary_size": 267_735},
        },
        "machine": {"torch": "2", "device": "cpu", "threads": 2, "cores": 2, "load_average_before": 0.0},
        "tokens_per_step": 768,
        "products": {
            p: [
                {
                    "name": "square 2",
                    "shape": [2, 2, 2],
                    "multiply_adds": 8 * 10**9,
                    "seconds": [2.0, 1.0, 1.0],
                },
                {"name": "square 4", "shape": [4, 4, 4], "multiply_adds": 64 * 10**9, "seconds": [16.0]},
                *products,
            ]
            for p in ours
        },
        "multiply_adds": {
            "layers": 2 * 10**9,
            "total": 3 * 10**9,
            "core": 10**9,
            "projections": 10**9,
            "feed_forward": 0,
        },
        "steps": {**dict.fromkeys(whole, times), **dict.fromkeys(parts, part)},
        "peak_bytes": {"training_step": peaks, "evaluation": peaks},
        "one_layer": {"heads": 8, "seconds": {"layers_training": one, "layers_inference": one}},
        "pruned": {"heads": 8, "heads_kept": [6, 3], "seconds": dict.fromkeys(whole, pair)}
        | {"peak_bytes": {"evaluation": {"float32": {"dense": 3 * 2**20, "pruned": 2 * 2**20}}}},
    }


def test_table_of_a_made_up_record() -> None:
    record = made_up()
    record["summary"] = summarize(record)
    rows = {
        cells[0]: cells[1:]
        for line in reversed(markdown(record).splitlines())
        if line.startswith("|")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert rows["square 2"] == ["2 x 2 x 2", "8.0", "8.0"]
    assert "it would reach 50% in float32 and 50% in bfloat16 of the product rate" in markdown(record)
    assert rows["whole model, evaluation, float32"] == ["2,000.0", "1,250.0", "0.625", "384", "614", "3", "2"]
    assert rows["ours float32"] == [
        "768",
        "1,000.0",
        "4.00x",
        "4.00x",
        "100",
        "0.25",
        "1,000.0",
        "4.00x",
        "75%",
    ]
    summary = record["summary"]
    assert summary["steps"]["bfloat16"]["ours"]["training_step_against_float32_yardstick"] == 8
    for precision in ("float32", "bfloat16"):
        assert summary["one_layer"]["layers_inference"][precision] == {"8": 1, "6": 0.75, "4": 0.6, "2": 0.25}
    assert summary["pruned"]["share_kept"] == 9 / 16
    assert summary["pruned"]["against_dense"]["layers_training"]["float32"] == 0.625
    assert record["summary"]["parts"]["float32"]["ours"] == pytest.approx(
        {
            "attention core": 0.1,
            "projections and norms": 0.9,
            "adaptive softmax": 0.1,
            "embedding": 0.1,
            "optimizer": 0.1,
            "data": 0.1,
            "rest": -0.4,
        }
    )
