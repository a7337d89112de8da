"""The comparison's tables: texts of their cells, and numbers for CSV."""

import math
from collections.abc import Mapping, Sequence

from allattn.comparison.compared_run import ModelFacts
from allattn.comparison.curves import SIZE_NAMES, At, Curve, ends
from allattn.comparison.doubt import Difference, Mean
from allattn.comparison.equal_size import EqualRow
from allattn.comparison.families import FamilyRow
from allattn.comparison.published import PAPER_DENSE, PAPER_DIFFERENCES, PAPER_FULL
from allattn.comparison.rows import MeanValidation, Row
from allattn.comparison.side_by_side import Comparison
from allattn.comparison.text_tables import CsvValue, TextTable, csv_text
from allattn.comparison.variants import setting_in_words
from allattn.record.bootstrap import DRAWS, TextInterval

TITLE = "Pruning runs, by variant"
COLUMNS = (
    "variant",
    "seeds",
    "sparsity",
    "heads kept",
    "parameters, layers",
    "parameters, all",
    "layers' µs per token",
    "test perplexity",
    "best valid. perplexity",
    "last valid. perplexity",
    "updates",
    "tokens after the cut",
)
EQUAL_TITLES = {at: f"Methods at equal {name}" for at, name in SIZE_NAMES.items()}
FAMILY_TITLE = "Families at equal parameters of the layers"
FAMILY_COLUMNS = ("variant", "parameters, layers", "test perplexity", "difference", "from")
RUN_COLUMNS = (
    "run",
    "variant",
    "seed",
    "heads kept",
    "parameters, layers (without embedding side)",
    "parameters, embedding side",
    "parameters, all (with embedding side)",
    "test perplexity",
    "best valid. perplexity",
    "last valid. perplexity",
    "found at",
)
NOTES = (
    "test perplexity: mean ± standard deviation over seeds",
    "parameters: of the layers = without the embedding side; all = with it",
    "valid. perplexity: of the model with the heads it keeps, so from the freeze on; @ optimizer step",
    "updates: optimizer steps of the run, for a dense model those of its own training where it is here; "
    "tokens after the cut: those that the model was trained on with the heads it keeps",
    "at equal size: each seed's perplexity is read off that seed's own runs of the method, with straight "
    "lines between neighbouring sizes, and never beyond the smallest and the largest; of parameters and "
    "time, sizes within 1 % count as equal",
    "difference over seeds: mean of test perplexity minus the full method's at the same seed, with its 95 % "
    "confidence interval (Student's t) in brackets, over n seeds",
    f"difference over the text: of the same seeds' tokens together, with the 95 % interval of {DRAWS:,} "
    "redrawn texts (paired bootstrap over articles) in brackets; where runs of that very size kept "
    "their articles",
    "paper's: Shim et al., WikiText-103 test, lambda 0.02, not at equal size; another text and a larger "
    f"model, {PAPER_DENSE[1]} dense and {PAPER_FULL[1]} by the full method",
)


def text_tables(comparison: Comparison) -> list[TextTable]:
    """Variants as they stand; methods at equal size; and, where there are several, families."""
    tasks = comparison.tasks()
    found = [
        TextTable(
            "variants",
            TITLE,
            (*COLUMNS, *tasks),
            [_cells(row) + [_task(row, name) for name in tasks] for row in comparison.rows],
        ),
        TextTable(
            "equal_size",
            EQUAL_TITLES[comparison.at],
            equal_columns(comparison.at),
            [_equal_cells(row, comparison.at) for row in comparison.equal],
        ),
    ]
    if comparison.families:
        rows = [_family_cells(row) for row in comparison.families]
        found.append(TextTable("families", FAMILY_TITLE, FAMILY_COLUMNS, rows))
    return found


def equal_columns(at: At) -> tuple[str, ...]:
    """Columns of the table at equal size."""
    return (
        "method",
        f"{SIZE_NAMES[at]} by its runs",
        "compared at",
        "seeds",
        "test perplexity there",
        "difference over seeds",
        "difference over the text",
        "paper's",
    )


def _cells(row: Row) -> list[str]:
    return [
        row.label,
        ", ".join(map(str, row.seeds)),
        f"{row.sparsity:.1%}",
        f"{_count(row.heads)}/{row.heads_total}",
        f"{row.layer_parameters:,.0f}",
        f"{row.parameters:,.0f}",
        "" if row.layer_microseconds is None else f"{row.layer_microseconds:.1f}",
        _mean(row.test),
        _validation(row.best),
        _validation(row.last),
        _whole(row.updates),
        _whole(row.tokens_after_cut),
    ]


def _task(row: Row, name: str) -> str:
    found = row.task(name)
    if found is None:
        return ""
    value, models = found
    return _mean(value, _decimals(value.mean)) + ("" if models == len(row.models) else f" (n = {models})")


def _equal_cells(row: EqualRow, at: At) -> list[str]:
    paper = PAPER_DIFFERENCES.get(row.method)
    return [
        row.label,
        _sizes(row.curves, at) if row.curves else "not measured",
        "" if row.asked is None else _size(row.asked, at),
        ", ".join(map(str, row.seeds)),
        "" if row.test is None else _mean(row.test),
        _difference(row.difference) or _why_none(row, at),
        _text_interval(row.text),
        "" if paper is None else f"{paper:+.2f}",
    ]


def _why_none(row: EqualRow, at: At) -> str:
    """Where the method and the full one stand, that no difference is given."""
    if not row.full or not row.curves:
        return ""
    return f"none: {_sizes(row.curves, at)} against {_sizes(row.full, at)}"


def _family_cells(found: FamilyRow) -> list[str]:
    row = found.row
    difference = _difference(found.difference)
    return [
        row.label,
        f"{row.layer_parameters:,.0f}",
        _mean(row.test),
        difference or f"none: {found.reference} has {_sizes(found.curves, At.parameters)}",
        found.reference,
    ]


def run_columns(comparison: Comparison) -> tuple[str, ...]:
    """Columns of the table of runs; the place of each is the last."""
    return (*RUN_COLUMNS[:-1], *comparison.tasks(), RUN_COLUMNS[-1])


def run_cells(comparison: Comparison) -> list[list[str]]:
    """One list of texts per run, in the order of `run_columns`."""
    found = []
    for each in comparison.placed:
        run, model = each.run, each.run.pruned
        scores = [
            "" if score is None else f"{score.perplexity:.2f} @ {score.step:,}"
            for score in (run.best_validation(), run.last_validation())
        ]
        counts = (model.layer_parameters, model.embedding_parameters, model.parameters)
        found.append(
            [
                run.name,
                each.label,
                str(run.seed),
                f"{model.heads}/{model.heads_total}",
                *(f"{count:,}" for count in counts),
                f"{model.perplexity:.2f}",
                *scores,
                *(_found(model.tasks.values.get(name)) for name in comparison.tasks()),
                run.where,
            ]
        )
    return found


def notes(comparison: Comparison) -> list[str]:
    """What the table's entries mean; which settings the differences are taken from."""
    lines = list(NOTES)
    if comparison.reference is not None:
        names = ("gates.lambda_max", "gates.lambda_warmup_steps", "gates.initial_pi", "gates.target_sparsity")
        known = {name: comparison.reference.get(name) for name in names}
        said = [setting_in_words(name, value) for name, value in known.items() if value is not None]
        lines.insert(0, f"full method: all three techniques, {', '.join(said)}")
    if comparison.tasks():
        lines.append(f"from lm-evaluation-harness, by task and metric: {', '.join(comparison.tasks())}")
    return [*lines, *_without_articles(comparison), *_how_scored(comparison)]


def _without_articles(comparison: Comparison) -> list[str]:
    """A line where runs, such as those of earlier versions, have not kept nats by article."""
    lacking = [run.name for run in comparison.runs if run.pruned.articles is None]
    if not lacking:
        return []
    who = "any run" if len(lacking) == len(comparison.runs) else ", ".join(lacking)
    return [f"nats by article were not kept of {who}: no interval over the text with them"]


def _how_scored(comparison: Comparison) -> list[str]:
    """A line for every way in which runs were scored, and the words that the vocabulary lacks."""
    tokens = comparison.runs[0].text[2]
    ways = dict.fromkeys(run.scored for run in comparison.runs if run.scored)
    lines = [f"scored {tokens:,} test tokens: {way}" for way in ways]
    unseen = comparison.runs[0].unseen_words
    if unseen is not None:
        share = f"{unseen:.1%} of the test text's words" if unseen else "none"
        lines.append(f"unseen words, scored as <unk>: {share}")
    return lines


def csv_tables(comparison: Comparison) -> dict[str, str]:
    """The numbers of every table, and of every run, in full precision by file name; the unknown is empty."""
    tables = {
        "table.csv": [_numbers(row) | _task_numbers(row, comparison.tasks()) for row in comparison.rows],
        "equal_size.csv": [_equal_numbers(row, comparison.at) for row in comparison.equal],
        "families.csv": [_family_numbers(row) for row in comparison.families],
        "runs.csv": _run_numbers(comparison),
    }
    return {name: csv_text(rows) for name, rows in tables.items() if rows}


def _run_numbers(comparison: Comparison) -> list[dict[str, CsvValue]]:
    """One line per run, so that every mean can be worked out again."""
    rows = []
    for each in comparison.placed:
        run = each.run
        row: dict[str, CsvValue] = {
            "run": run.name,
            "found_at": run.where,
            "variant": each.label,
            "method": each.method_label,
            "seed": run.seed,
            **_model_numbers(run.pruned),
            "dense_test_perplexity": run.dense.perplexity,
            "updates": run.updates,
            "tokens_after_cut": run.tokens_after_cut,
        }
        for name, score in (("best_valid", run.best_validation()), ("last_valid", run.last_validation())):
            row[f"{name}_perplexity"] = score.perplexity if score else None
            row[f"{name}_step"] = score.step if score else None
        rows.append(row | {name: run.pruned.tasks.values.get(name) for name in comparison.tasks()})
    return rows


def _model_numbers(model: ModelFacts) -> dict[str, CsvValue]:
    return {
        "family": model.family,
        "sparsity": model.sparsity,
        "heads_kept": model.heads,
        "heads_total": model.heads_total,
        "parameters_layers": model.layer_parameters,
        "parameters_embedding_side": model.embedding_parameters,
        "parameters_all": model.parameters,
        "layer_microseconds_per_token": model.layer_microseconds,
        "test_perplexity": model.perplexity,
    }


def _numbers(row: Row) -> dict[str, CsvValue]:
    values: dict[str, CsvValue] = {
        "variant": row.label,
        "family": row.models[0].family,
        "seeds": " ".join(map(str, row.seeds)),
        "sparsity": row.sparsity,
        "heads_kept": row.heads,
        "heads_total": row.heads_total,
        "parameters_layers": row.layer_parameters,
        "parameters_all": row.parameters,
        "layer_microseconds_per_token": row.layer_microseconds,
        **_mean_numbers("test_perplexity", row.test),
    }
    for name, score in (("best_valid", row.best), ("last_valid", row.last)):
        values |= _mean_numbers(f"{name}_perplexity", score.perplexity if score else None)
        values[f"{name}_steps"] = " ".join(map(str, score.steps)) if score else None
    return values | {"updates": row.updates, "tokens_after_cut": row.tokens_after_cut}


def _task_numbers(row: Row, tasks: Sequence[str]) -> dict[str, CsvValue]:
    values: dict[str, CsvValue] = {}
    for name in tasks:
        value, models = row.task(name) or (None, 0)
        values |= {**_mean_numbers(name, value), f"{name}_models": models}
    return values


def _equal_numbers(row: EqualRow, at: At) -> dict[str, CsvValue]:
    smallest, largest = ends(row.curves.values()) if row.curves else (None, None)
    text = row.text
    return {
        "method": row.label,
        "at": at.value,
        "size": row.asked,
        "smallest_size": smallest,
        "largest_size": largest,
        "seeds": " ".join(map(str, row.seeds)),
        **_mean_numbers("test_perplexity", row.test),
        **_difference_numbers(row.difference),
        "text_difference": text.difference if text else None,
        "text_low_95": text.low if text else None,
        "text_high_95": text.high if text else None,
        "text_articles": text.articles if text else None,
        "paper_difference": PAPER_DIFFERENCES.get(row.method),
    }


def _family_numbers(found: FamilyRow) -> dict[str, CsvValue]:
    return {
        "variant": found.row.label,
        "parameters_layers": found.row.layer_parameters,
        **_mean_numbers("test_perplexity", found.row.test),
        "reference": found.reference,
        **_difference_numbers(found.difference),
    }


def _mean_numbers(name: str, value: Mean | None) -> dict[str, CsvValue]:
    return {
        name: value.mean if value else None,
        f"{name}_standard_deviation": value.deviation if value else None,
    }


def _difference_numbers(value: Difference | None) -> dict[str, CsvValue]:
    return {
        "difference": value.mean if value else None,
        "difference_half_width_95": value.half_width if value else None,
        "difference_pairs": value.pairs if value else None,
    }


def _count(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def _mean(value: Mean, decimals: int = 2) -> str:
    deviation = "" if math.isnan(value.deviation) else f" ± {value.deviation:.{decimals}f}"
    return f"{value.mean:.{decimals}f}{deviation}"


def _decimals(value: float) -> int:
    """For a share, or for a perplexity."""
    return 4 if abs(value) < 10 else 2


def _found(value: float | None) -> str:
    return "" if value is None else f"{value:.{_decimals(value)}f}"


def _validation(value: MeanValidation | None) -> str:
    if value is None:
        return ""
    first, last = min(value.steps), max(value.steps)
    steps = f"{first:,}" if first == last else f"{first:,}–{last:,}"
    return f"{_mean(value.perplexity)} @ {steps}"


def _difference(value: Difference | None) -> str:
    if value is None:
        return ""
    if math.isnan(value.half_width):
        return f"{value.mean:+.2f} (one seed)"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.2f} [{low:+.2f}, {high:+.2f}], n = {value.pairs}"


def _text_interval(value: TextInterval | None) -> str:
    if value is None:
        return ""
    if value.articles < 2:
        return f"{value.difference:+.2f} (one article)"
    return f"{value.difference:+.2f} [{value.low:+.2f}, {value.high:+.2f}]"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _size(value: float, at: At) -> str:
    if at is At.layer_time:
        return f"{value:.1f} µs"
    return _count(value) if at is At.heads else f"{value:,.0f}"


def _sizes(drawn: Mapping[int, Curve], at: At) -> str:
    """From the smallest to the largest that any seed's runs have."""
    low, high = (_size(end, at) for end in ends(drawn.values()))
    return low if low == high else f"{low}–{high}"
