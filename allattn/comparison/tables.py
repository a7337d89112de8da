"""The comparison's table for terminals, Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from allattn.comparison.comparison import Comparison, Difference, Mean, MeanValidation, Row
from allattn.comparison.variants import setting_in_words

TITLE = "Pruning runs, by variant"
COLUMNS = (
    "variant",
    "seeds",
    "sparsity",
    "heads kept",
    "parameters, layers",
    "parameters, all",
    "test perplexity",
    "best valid. perplexity",
    "last valid. perplexity",
    "difference, test",
    "paper's",
)
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
    "difference: mean of test perplexity minus the full method's at the same seed, with its 95 % confidence "
    "interval (Student's t) in brackets",
    "paper's: Shim et al., WikiText-103 test, lambda 0.02; another text and a larger model",
)


def cells(comparison: Comparison) -> list[list[str]]:
    """One list of texts per row, in the order of COLUMNS."""
    return [
        [
            row.variant,
            ", ".join(map(str, row.seeds)),
            f"{row.sparsity:.1%}",
            f"{_count(row.heads)}/{row.heads_total}",
            f"{row.layer_parameters:,.0f}",
            f"{row.parameters:,.0f}",
            _mean(row.test),
            _validation(row.best),
            _validation(row.last),
            _difference(row.difference),
            "" if row.paper is None else f"{row.paper:+.2f}",
        ]
        for row in comparison.rows
    ]


def run_cells(comparison: Comparison) -> list[list[str]]:
    """One list of texts per run, in the order of RUN_COLUMNS."""
    found = []
    for run, variant in zip(comparison.runs, comparison.variants, strict=True):
        model = run.pruned
        scores = [
            "" if score is None else f"{score.perplexity:.2f} @ {score.step:,}"
            for score in (run.best_validation(), run.last_validation())
        ]
        counts = (model.layer_parameters, model.embedding_parameters, model.parameters)
        found.append(
            [
                run.name,
                variant,
                str(run.seed),
                f"{model.heads}/{model.heads_total}",
                *(f"{count:,}" for count in counts),
                f"{model.perplexity:.2f}",
                *scores,
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
    return [*lines, *_how_scored(comparison)]


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


def terminal_table(comparison: Comparison) -> Table:
    """For a rich console; names are shown as they are, never read as markup."""
    table = Table(title=TITLE)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in cells(comparison):
        table.add_row(*map(Text, row))
    return table


def markdown_table(comparison: Comparison) -> str:
    """A Markdown table with its notes."""
    lines = [_markdown_row(COLUMNS), "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    lines += [_markdown_row(row) for row in cells(comparison)]
    return "\n".join([*lines, "", *(f"- {_markdown(note)}" for note in notes(comparison))]) + "\n"


def latex_table(comparison: Comparison) -> str:
    """A LaTeX table for the package booktabs, its notes as comments."""
    rows = [" & ".join(map(_latex, row)) + r" \\" for row in cells(comparison)]
    lines = [
        *(f"% {note}" for note in notes(comparison)),
        r"\begin{tabular}{l" + "r" * (len(COLUMNS) - 1) + "}",
        r"\toprule",
        " & ".join(map(_latex, COLUMNS)) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


CsvValue = str | int | float | None


def csv_table(comparison: Comparison) -> str:
    """The table's numbers in full precision; what is not known is empty."""
    rows = [_numbers(row) for row in comparison.rows]
    return _csv_text([list(rows[0]), *(list(map(_csv, row.values())) for row in rows)])


def runs_csv(comparison: Comparison) -> str:
    """One line per run in full precision, so that every mean can be worked out again."""
    head = ["run", "found_at", "variant", "seed", "sparsity", "heads_kept", "heads_total"]
    head += ["parameters_layers", "parameters_embedding_side", "parameters_all", "test_perplexity"]
    head += ["dense_test_perplexity", "best_valid_perplexity", "best_valid_step"]
    head += ["last_valid_perplexity", "last_valid_step"]
    lines = [head]
    for run, variant in zip(comparison.runs, comparison.variants, strict=True):
        model = run.pruned
        values: list[CsvValue] = [run.name, run.where, variant, run.seed]
        values += [model.sparsity, model.heads, model.heads_total]
        values += [model.layer_parameters, model.embedding_parameters, model.parameters]
        values += [model.perplexity, run.dense.perplexity]
        for score in (run.best_validation(), run.last_validation()):
            values += [None, None] if score is None else [score.perplexity, score.step]
        lines.append(list(map(_csv, values)))
    return _csv_text(lines)


def _numbers(row: Row) -> dict[str, CsvValue]:
    values: dict[str, CsvValue] = {
        "variant": row.variant,
        "seeds": " ".join(map(str, row.seeds)),
        "sparsity": row.sparsity,
        "heads_kept": row.heads,
        "heads_total": row.heads_total,
        "parameters_layers": row.layer_parameters,
        "parameters_all": row.parameters,
        "test_perplexity": row.test.mean,
        "test_perplexity_standard_deviation": row.test.deviation,
    }
    for name, score in (("best_valid", row.best), ("last_valid", row.last)):
        values[f"{name}_perplexity"] = score.perplexity.mean if score else None
        values[f"{name}_perplexity_standard_deviation"] = score.perplexity.deviation if score else None
        values[f"{name}_steps"] = " ".join(map(str, score.steps)) if score else None
    difference = row.difference
    return values | {
        "difference": None if difference is None else difference.mean,
        "difference_half_width_95": None if difference is None else difference.half_width,
        "difference_pairs": None if difference is None else difference.pairs,
        "paper_difference": row.paper,
    }


def _csv_text(lines: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _csv(value: CsvValue) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def _count(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def _mean(value: Mean) -> str:
    return f"{value.mean:.2f}" + ("" if math.isnan(value.deviation) else f" ± {value.deviation:.2f}")


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
    return f"{value.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown, row)) + " |"


def _markdown(text: str) -> str:
    return _replaced(_on_one_line(text), {sign: f"\\{sign}" for sign in r"\|`*_<>"})


def _latex(text: str) -> str:
    signs = {sign: f"\\{sign}" for sign in "&%$#_{}"}
    signs |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    signs |= {"±": r"$\pm$", "–": "--", "@": r"{@}", "<": "$<$", ">": "$>$"}
    # A sign before a number becomes a mathematical one: LaTeX sets a bare minus as a hyphen.
    return re.sub(r"(^|[ \[])([+-])(?=\d)", r"\1$\2$", _replaced(_on_one_line(text), signs))


def _replaced(text: str, signs: dict[str, str]) -> str:
    return "".join(signs.get(sign, sign) for sign in text)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
