"""The benchmark's record as Markdown."""

from typing import Any

from allattn.report.benchmark.arithmetic import training_products
from allattn.report.benchmark.summary import medians

Record = dict[str, Any]
_TITLES = {
    "training_step": "whole model, training step",
    "evaluation": "whole model, evaluation",
    "layers_training": "layers, forward and backward",
    "layers_inference": "layers, inference",
    "generated_token": "one generated token",
}


def markdown(record: Record) -> str:
    """Tables of a finished record (raw repetitions and `summary`)."""
    parts = [_machine(record), _rates(record), _training(record), _evaluation(record), _parts(record)]
    parts += [_one_layer(record), _pruned(record), _targets(record)]
    return "\n\n".join(parts) + "\n"


def _machine(record: Record) -> str:
    machine, settings, counted = record["machine"], record["settings"], record["multiply_adds"]
    model = settings["model"]
    return (
        f"torch {machine['torch']}, {machine['device']}, {machine['threads']} threads of {machine['cores']} "
        f"cores, load average before {machine['load_average_before']:.1f}; {model['layers']} layers of width "
        f"{model['width']}, {model['heads']} heads, {model['persistent_vectors']} persistent vectors, "
        f"B = {settings['batch_size']}, T = {settings['segment_length']}, M = {model['memory_length']}, "
        f"vocabulary {model['vocabulary_size']:,}; medians of {settings['repeats']} repetitions. A training "
        f"step is {training_products(counted['total']) / 1e9:,.1f}e9 multiply-adds, "
        f"{training_products(counted['layers']) / 1e9:,.1f}e9 of them in the layers."
    )


def _rates(record: Record) -> str:
    rows = [
        [precision, f"{rate['multiply_adds_per_second'] / 1e9:,.1f}", " x ".join(map(str, rate["shape"]))]
        for precision, rate in record["summary"]["rates"].items()
    ]
    return _table(["matrix products", "1e9 multiply-adds/s", "best shape"], rows)


def _training(record: Record) -> str:
    time = medians(record["steps"])
    rows = []
    for precision, names in record["summary"]["steps"].items():
        for name, row in names.items():
            rows.append(
                [
                    f"{name} {precision}",
                    f"{row['training_tokens_per_second']:,.0f}",
                    f"{1e3 * time['training_step'][precision][name]:,.1f}",
                    _times(row["faster"]["training_step"]),
                    _times(row["training_step_against_float32_yardstick"]),
                    *_peak(row, "training_step"),
                    f"{1e3 * time['layers_training'][precision][name]:,.1f}",
                    _times(row["faster"]["layers_training"]),
                    f"{row['layers_training_share_of_rate']:.0%}",
                ]
            )
    head = ["training step", "tokens/s", "ms", "yardstick = 1x", "float32 yardstick = 1x", "peak, MiB"]
    return _table([*head, "yardstick = 1", "layers, ms", "yardstick = 1x", "of the product rate"], rows)


def _evaluation(record: Record) -> str:
    time = medians(record["steps"])
    rows = []
    for precision, names in record["summary"]["steps"].items():
        for name, row in names.items():
            rows.append(
                [
                    f"{name} {precision}",
                    f"{row['evaluation_tokens_per_second']:,.0f}",
                    f"{1e3 * time['evaluation'][precision][name]:,.1f}",
                    _times(row["faster"]["evaluation"]),
                    *_peak(row, "evaluation"),
                    f"{1e3 * time['layers_inference'][precision][name]:,.1f}",
                    _times(row["faster"]["layers_inference"]),
                    f"{row['layers_inference_share_of_rate']:.0%}",
                ]
            )
    head = ["evaluation", "tokens/s", "ms", "yardstick = 1x", "peak, MiB", "yardstick = 1"]
    return _table([*head, "layers, ms", "yardstick = 1x", "of the product rate"], rows)


def _parts(record: Record) -> str:
    rows, parts = [], []
    for precision, names in record["summary"]["parts"].items():
        for name, shares in names.items():
            parts = list(shares)
            rows.append([f"{name} {precision}", *(f"{share:.1%}" for share in shares.values())])
    return _table(["share of a training step", *parts], rows)


def _one_layer(record: Record) -> str:
    rows, heads = [], []
    for what, by_precision in record["summary"]["one_layer"].items():
        for precision, by_heads in by_precision.items():
            heads = list(by_heads)
            rows.append([f"{_TITLES[what]}, {precision}", *(f"{share:.3f}" for share in by_heads.values())])
    dense = record["one_layer"]["heads"]
    return _table([f"one layer, time against {dense} heads", *(f"{kept} heads" for kept in heads)], rows)


def _pruned(record: Record) -> str:
    pruned = record["summary"]["pruned"]
    rows = []
    for what, by_precision in pruned["against_dense"].items():
        for precision, ratio in by_precision.items():
            time = pruned["seconds"][what][precision]
            milliseconds = [f"{1e3 * time[name]:,.1f}" for name in ("dense", "pruned")]
            rows.append([f"{_TITLES[what]}, {precision}", *milliseconds, f"{ratio:.3f}"])
    layers = len(record["pruned"]["heads_kept"])
    kept = f"{pruned['heads_kept']} of {pruned['heads_total']} heads ({pruned['share_kept']:.3f})"
    return _table([f"{layers} layers, {kept} against all", "dense, ms", "pruned, ms", "ratio"], rows)


def _targets(record: Record) -> str:
    rows = []
    for target in record["summary"]["targets"]:
        limit = f"{'at least' if target['at_least'] else 'at most'} {target['limit']:.3f}"
        if target["reached"] is None:
            rows.append([target["target"], limit, "not measured", ""])
        else:
            rows.append(
                [target["target"], limit, f"{target['reached']:.3f}", "yes" if target["met"] else "no"]
            )
    return _table(["target", "limit", "reached", "met"], rows)


def _peak(row: Record, action: str) -> list[str]:
    peak, ratio = row["peak_bytes"].get(action), row["peak_against_yardstick"].get(action)
    return ["" if peak is None else f"{peak / 2**20:,.0f}", "" if ratio is None else f"{ratio:.2f}"]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
