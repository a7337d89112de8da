"""The benchmark's record as Markdown."""

from typing import Any

from allattn.benchmark.arithmetic import training_products
from allattn.benchmark.ratios import medians

Record = dict[str, Any]
_TITLES = {
    "training_step": "whole model, training step",
    "evaluation": "whole model, evaluation",
    "layers_training": "layers, forward and backward",
    "layers_inference": "layers, inference",
    "teacher_forward": "forward of a teacher",
    "generated_token": "one generated token",
}
_LAYERS = {"training_step": "layers_training", "evaluation": "layers_inference"}  # what is timed of both


def markdown(record: Record) -> str:
    """Tables of a finished record (raw repetitions and `summary`)."""
    parts = [_machine(record), _rates(record), *(_variants(record, action) for action in _LAYERS)]
    parts += [_parts(record), _one_layer(record), _pruned(record)]
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
    by_precision = record["summary"]["rates"]
    rows = []
    for entry in next(iter(record["products"].values())):
        cells = [f"{rate['by_name'][entry['name']] / 1e9:,.1f}" for rate in by_precision.values()]
        rows.append([entry["name"], " x ".join(map(str, entry["shape"])), *cells])
    table = markdown_table(["1e9 multiply-adds/s", "shape", *by_precision], rows)
    alone = [
        f"{rate['products_alone']:.0%} in {precision}"
        for precision, rate in by_precision.items()
        if "products_alone" in rate
    ]
    if not alone:
        return table
    return (
        f"{table}\n\nThe product rate is the best of these. If nothing but products took time in the layers' "
        f"training, none twice, at the rates of the last four, it would reach {' and '.join(alone)} of the "
        "product rate."
    )


def _variants(record: Record, action: str) -> str:
    """A row for every variant: the whole action, then its layers alone."""
    time, layers, training = medians(record["steps"]), _LAYERS[action], action == "training_step"
    rows = []
    for precision, names in record["summary"]["steps"].items():
        for name, row in names.items():
            cells = [f"{name} {precision}", f"{row['tokens_per_second'][action]:,.0f}"]
            cells += [f"{1e3 * time[action][precision][name]:,.1f}", _times(row["faster"][action])]
            if training:
                cells.append(_times(row["training_step_against_float32_yardstick"]))
            cells += [*_peak(row, action), f"{1e3 * time[layers][precision][name]:,.1f}"]
            rows.append([*cells, _times(row["faster"][layers]), f"{row['share_of_rate'][layers]:.0%}"])
    head = [action.replace("_", " "), "tokens/s", "ms", "yardstick = 1x"]
    head += ["float32 yardstick = 1x"] * training
    head += ["peak, MiB", "yardstick = 1", "layers, ms", "yardstick = 1x", "of the product rate"]
    return markdown_table(head, rows)


def _parts(record: Record) -> str:
    rows, parts = [], []
    for precision, names in record["summary"]["parts"].items():
        for name, shares in names.items():
            parts = list(shares)
            rows.append([f"{name} {precision}", *(f"{share:.1%}" for share in shares.values())])
    return markdown_table(["share of a training step", *parts], rows)


def _one_layer(record: Record) -> str:
    rows, heads = [], []
    for what, by_precision in record["summary"]["one_layer"].items():
        for precision, by_heads in by_precision.items():
            heads = list(by_heads)
            rows.append([f"{_TITLES[what]}, {precision}", *(f"{share:.3f}" for share in by_heads.values())])
    dense = record["one_layer"]["heads"]
    return markdown_table(
        [f"one layer, time against {dense} heads", *(f"{kept} heads" for kept in heads)], rows
    )


def _pruned(record: Record) -> str:
    pruned, names = record["summary"]["pruned"], ("dense", "pruned")
    rows = []
    for what, by_precision in pruned["against_dense"].items():
        tokens = 1 if what == "generated_token" else record["tokens_per_step"]
        for precision, ratio in by_precision.items():
            time = pruned["seconds"][what][precision]
            peak = pruned["peak_bytes"].get(what, {}).get(precision, {})
            rows.append(
                [
                    f"{_TITLES[what]}, {precision}",
                    *(f"{1e3 * time[name]:,.1f}" for name in names),
                    f"{ratio:.3f}",
                    *(f"{tokens / time[name]:,.0f}" for name in names),
                    *(_mebibytes(peak.get(name)) for name in names),
                ]
            )
    layers = len(record["pruned"]["heads_kept"])
    kept = f"{pruned['heads_kept']} of {pruned['heads_total']} heads ({pruned['share_kept']:.3f})"
    head = [f"{layers} layers, {kept} against all", "dense, ms", "pruned, ms", "ratio"]
    return markdown_table(
        head + [f"{name}, {unit}" for unit in ("tokens/s", "peak MiB") for name in names], rows
    )


def _peak(row: Record, action: str) -> list[str]:
    peak, ratio = row["peak_bytes"].get(action), row["peak_against_yardstick"].get(action)
    return [_mebibytes(peak), "" if ratio is None else f"{ratio:.2f}"]


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
