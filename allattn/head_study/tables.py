"""A study's tables: texts of their cells, and numbers for CSV."""

import math
import statistics
from collections.abc import Mapping, Sequence

from allattn.comparison.text_tables import CsvValue, TextTable, csv_text
from allattn.head_study.reading import Reading
from allattn.head_study.result import Mask, Measured, StudyResult
from allattn.head_study.summaries import Quantity, area, crossings, deviation, quantities

TITLE = "Which heads do nothing: a head study"
NOTES = (
    "this is not the L0 prune of Shim et al. (arXiv:2110.03252): heads are zeroed by a threshold on a score, "
    "without learned gates, s_g or fine-tuning, so no number here is one of a pruning run",
    "a cell: the number at the share of heads really zeroed, over all layers (and, of a dynamic mask, over "
    "all sequences of the test text)",
    "+1%, +5%, +10%: the share up to which perplexity stays within that much of the unmasked model's; the "
    "last crossing, straight lines between the measured shares; ≥ where the curve ends within",
    "area: under the curve of ln(perplexity / unmasked perplexity), from 0 to the largest share that all "
    "scores of the table reach, divided by that share",
    "random: mean ± standard deviation over seeds",
)
STATIC_NOTE = (
    "static: the heads of the lowest mean score over the calibration text are zeroed in every sequence; only "
    "these can be removed from the weights"
)
DYNAMIC_NOTE = (
    "dynamic: in every sequence the heads beyond a threshold from the calibration text are zeroed; a mask by "
    "head outputs (lthon, ahon, circuit_ahon and what is derived from them) saves no time, as an output must "
    "be computed before it can be found small"
)
ACCURACY_NOTE = (
    "accuracy: of lm-evaluation-harness through the same mask; one point: the share up to which it stays "
    "within 0.01 of the unmasked model's, the last crossing; area: under the curve of accuracy, likewise"
)
AGREEMENT_NOTE = (
    "agreement: Spearman's correlation over all heads of the mean scores, by how much each says that a head "
    "does; shared: how many of the lowest heads of one are among as many lowest of the other, by chance in "
    "brackets"
)
CLOSED_NOTE = (
    "closed by gates: of the k heads that the pruned model lost to its learned L0 gates, how many are among "
    "the k that the dense model's score ranks lowest (in one layer, or in all); by chance: expected of k "
    "heads drawn at random, so where every head was closed it is all of them"
)
READING_NOTES = (
    "cancellation: norm(Y) / sum over heads of norm(Z_h WO_h), mean over tokens; 1 = all heads pull one way",
    "kurtosis: of a token's coordinates in the residual stream as it leaves the layer, mean over tokens, and "
    "the same after a random rotation; a stream without a basis of its own has the same twice (Gaussian: 3)",
    "zero, identity: perplexity of the test text where the layer's heads write nothing, or Y = Z (only where "
    "heads times head width is the model's width); learned = the unmasked model",
    "mass on memory, segment, persistent: mean attention on each kind of keys, over tokens and heads",
)


def text_tables(result: StudyResult) -> list[TextTable]:
    """Perplexity and accuracy by mask; agreement; learned gates; the reading of WO."""
    found = [_table(result, mask, each) for mask in result.masks() for each in quantities(result)]
    found += [_agreement_table(result)] if result.agreement else []
    found += [_closed_table(result)] if result.closed_by_gates else []
    found += [_reading_table(result, result.reading)] if result.reading is not None else []
    return found


def notes(result: StudyResult) -> list[str]:
    """What the tables' entries mean."""
    masks = result.masks()
    heads = f"{result.model}: {sum(result.heads)} heads in {len(result.heads)} layers"
    lines = [heads, *result.texts, *NOTES]
    lines += [STATIC_NOTE] if Mask.static in masks else []
    lines += [DYNAMIC_NOTE] if Mask.dynamic in masks else []
    lines += [ACCURACY_NOTE] if len(quantities(result)) > 1 else []
    lines += [AGREEMENT_NOTE] if result.agreement else []
    lines += [CLOSED_NOTE] if result.closed_by_gates else []
    lines += READING_NOTES if result.reading is not None else ()
    return lines


def _table(result: StudyResult, mask: Mask, quantity: Quantity) -> TextTable:
    """Score x share."""
    asked = result.asked(mask)
    columns = ("score", *(f"{share:.4g} asked" for share in asked), *quantity.limits(), "area")
    rows = []
    for name in result.names(mask):
        cells = [_cell(result.at(mask, name, share), quantity) for share in asked]
        ends = crossings(result, mask, name, quantity)
        within = [f"{'' if each.reached else '≥ '}{each.share:.1%}" for each in ends]
        mean = area(result, mask, name, quantity)
        rows.append([name, *cells, *within, "" if math.isnan(mean) else f"{mean:.4f}"])
    unmasked = quantity.text(quantity.value(result.unmasked))
    return TextTable(
        f"{mask.value}_{quantity.name.replace(' ', '_')}",
        f"{quantity.name}, {mask.value} mask (unmasked {unmasked})",
        columns,
        rows,
    )


def _cell(found: Sequence[Measured], quantity: Quantity) -> str:
    if not found:
        return ""
    values = [quantity.value(each) for each in found]
    spread = deviation(values)
    beside = "" if math.isnan(spread) else f" ± {quantity.text(spread)}"
    share = statistics.fmean(each.share for each in found)
    return f"{quantity.text(statistics.fmean(values))}{beside} at {share:.1%}"


def _agreement_table(result: StudyResult) -> TextTable:
    names = list(dict.fromkeys(name for each in result.agreement for name in (each.one, each.other)))
    cells = {
        (each.one, each.other): f"{each.spearman:+.2f}, {each.shared} ({each.by_chance:.1f})"
        for each in result.agreement
    }
    rows = [[one, *(cells.get((one, other), "") for other in names[1:])] for one in names[:-1]]
    lowest = result.agreement[0].lowest
    title = f"Agreement of scores: Spearman's correlation, shared of the lowest {lowest} (by chance)"
    return TextTable("agreement", title, ("score", *names[1:]), rows)


def _closed_table(result: StudyResult) -> TextTable:
    layers = list(dict.fromkeys(each.layer for each in result.closed_by_gates))
    by_score: dict[str, list[str]] = {}
    for each in result.closed_by_gates:
        cell = f"{each.shared} of {each.closed} ({each.by_chance:.1f})"
        by_score.setdefault(each.score, []).append(cell)
    columns = ["all layers" if layer is None else f"layer {layer}" for layer in layers]
    title = "Heads closed by learned gates that are among the lowest of the dense model's score (by chance)"
    return TextTable(
        "closed_by_gates", title, ("score", *columns), [[name, *cells] for name, cells in by_score.items()]
    )


def _reading_table(result: StudyResult, reading: Reading) -> TextTable:
    rows = [
        [
            str(layer.layer),
            f"{layer.cancellation:.3f}",
            _range(layer.block_norms),
            _range(layer.effective_ranks),
            _range(layer.shares_of_output),
            f"{layer.kurtosis:.1f}",
            f"{layer.rotated_kurtosis:.1f}",
            _known(layer.zero_perplexity),
            _known(layer.identity_perplexity),
            *(f"{statistics.fmean(values):.3f}" for values in layer.masses.values()),
        ]
        for layer in reading.layers
    ]
    columns = (
        "layer",
        "cancellation",
        "norm of WO_h, least to most",
        "effective rank",
        "share of Y",
        "kurtosis",
        "rotated",
        "perplexity, zero",
        "perplexity, identity",
        *(name.replace("_", " ") for name in reading.layers[0].masses),
    )
    unmasked = result.unmasked.perplexity
    return TextTable(
        "reading", f"Output projections by layer (learned: perplexity {unmasked:.2f})", columns, rows
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def _known(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def csv_tables(result: StudyResult) -> dict[str, str]:
    """The numbers of all tables, of every head and every measurement, in full precision by file name."""
    tables: dict[str, Sequence[Mapping[str, CsvValue]]] = {
        "points.csv": _points(result),
        "summary.csv": _summary(result),
        "heads.csv": _heads(result),
        "agreement.csv": [vars(each) for each in result.agreement],
        "closed_by_gates.csv": [vars(each) for each in result.closed_by_gates],
        "layers.csv": _layers(result),
    }
    return {name: csv_text(rows) for name, rows in tables.items() if rows}


def _points(result: StudyResult) -> list[dict[str, CsvValue]]:
    unmasked = {"mask": "none", "score": None, "seed": None, "share_asked": 0.0} | _numbers(result.unmasked)
    return [
        unmasked,
        *(
            {
                "mask": point.mask.value,
                "score": point.score,
                "seed": point.seed,
                "share_asked": point.asked,
                **_numbers(measured),
            }
            for point, measured in result.points.items()
        ),
    ]


def _numbers(measured: Measured) -> dict[str, CsvValue]:
    return {
        "share": measured.share,
        "nats": measured.nats,
        "tokens": measured.tokens,
        "perplexity": measured.perplexity,
        **measured.tasks,
    }


def _summary(result: StudyResult) -> list[dict[str, CsvValue]]:
    rows = []
    for mask in result.masks():
        for score in result.names(mask):
            row: dict[str, CsvValue] = {"mask": mask.value, "score": score}
            for each in quantities(result):
                ends = crossings(result, mask, score, each)
                for limit, found in zip(each.limits(), ends, strict=True):
                    row[f"{each.name} {limit}"] = found.share
                    row[f"{each.name} {limit} reached"] = int(found.reached)
                row[f"{each.name} area"] = area(result, mask, score, each)
            rows.append(row)
    return rows


def _heads(result: StudyResult) -> list[dict[str, CsvValue]]:
    read = {} if result.reading is None else {each.layer: each for each in result.reading.layers}
    rows = []
    for layer, heads in enumerate(result.heads):
        for head in range(heads):
            row: dict[str, CsvValue] = {"layer": layer, "head": head}
            row |= {name: values[layer][head] for name, values in result.scores.items()}
            if layer in read:
                row["block_norm"] = read[layer].block_norms[head]
                row["effective_rank"] = read[layer].effective_ranks[head]
                row["share_of_output"] = read[layer].shares_of_output[head]
                row |= {name: values[head] for name, values in read[layer].masses.items()}
            rows.append(row)
    return rows


def _layers(result: StudyResult) -> list[dict[str, CsvValue]]:
    if result.reading is None:
        return []
    return [
        {
            "layer": each.layer,
            "cancellation": each.cancellation,
            "kurtosis": each.kurtosis,
            "rotated_kurtosis": each.rotated_kurtosis,
            "zero_perplexity": each.zero_perplexity,
            "identity_perplexity": each.identity_perplexity,
        }
        for each in result.reading.layers
    ]
