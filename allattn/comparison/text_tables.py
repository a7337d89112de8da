"""Tables of texts for terminals, Markdown, LaTeX and CSV, whatever they say.

The writers are a line or three each. pandas' and tabulate's would save none: they leave the signs that
Markdown reads as they are, set ± and a minus as LaTeX does not, and turn counts beside an unknown one into
decimals.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

CsvValue = str | int | float | None


@dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    name: str  # of its files and in W&B
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def terminal_tables(tables: Sequence[TextTable]) -> list[Table]:
    """For a rich console; names are shown as they are, never read as markup."""
    found = []
    for each in tables:
        table = Table(title=each.title)
        for number, column in enumerate(each.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in each.rows:
            table.add_row(*map(Text, row))
        found.append(table)
    return found


def markdown_tables(tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    """Markdown tables with their notes."""
    parts = []
    for each in tables:
        lines = [_markdown_row(each.columns), "| --- |" + " ---: |" * (len(each.columns) - 1)]
        lines += [_markdown_row(row) for row in each.rows]
        parts.append("\n".join([f"**{_markdown(each.title)}**", "", *lines]))
    parts.append(markdown_list(notes))
    return "\n\n".join(parts) + "\n"


def markdown_list(lines: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {_markdown(line)}" for line in lines)


def latex_tables(tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    """LaTeX tables for the package booktabs, titles and notes as comments."""
    lines = [f"% {_on_one_line(note)}" for note in notes]
    for each in tables:
        lines += [
            f"% {each.title}",
            r"\begin{tabular}{l" + "r" * (len(each.columns) - 1) + "}",
            r"\toprule",
            _latex_row(each.columns),
            r"\midrule",
            *map(_latex_row, each.rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    return "\n".join(lines) + "\n"


def csv_text(rows: Sequence[Mapping[str, CsvValue]]) -> str:
    """Rows with the columns of the first one, numbers in full precision; the unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if _is_nan(value) else value for name, value in row.items()})
    return text.getvalue()


def _is_nan(value: CsvValue) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown, row)) + " |"


def _markdown(text: str) -> str:
    return _replaced(_on_one_line(text), {sign: f"\\{sign}" for sign in r"\|`*_<>"})


def _latex_row(row: Sequence[str]) -> str:
    return " & ".join(map(_latex, row)) + r" \\"


def _latex(text: str) -> str:
    signs = {sign: f"\\{sign}" for sign in "&%$#_{}"}
    signs |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    signs |= {"±": r"$\pm$", "µ": r"$\mu$", "–": "--", "@": r"{@}", "<": "$<$", ">": "$>$"}
    # A sign before a number becomes a mathematical one: LaTeX sets a bare minus as a hyphen.
    return re.sub(r"(^|[ \[])([+-])(?=\d)", r"\1$\2$", _replaced(_on_one_line(text), signs))


def _replaced(text: str, signs: dict[str, str]) -> str:
    return "".join(signs.get(sign, sign) for sign in text)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
