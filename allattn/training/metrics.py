"""metrics.csv: one row per logged optimizer step, complete after any interruption."""

import csv
import io
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from allattn.errors import InputError
from allattn.files import naming, write_atomically

_TEXTS = ("phase", "valid_heads")  # metrics that are no numbers


class CsvMetrics(Logger):
    """Appends rows to metrics.csv; a resumed run first drops the rows after its checkpoint.

    Args:
        path: the file.
        keep_until: optimizer step of the checkpoint that is resumed; 0 starts an empty file.
    """

    def __init__(self, path: Path, keep_until: int = 0) -> None:
        super().__init__()
        self.path = path
        self._rows = [row for row in read_metrics(path) if int(row["step"]) <= keep_until]
        self._columns = list(dict.fromkeys(["step", *(name for row in self._rows for name in row)]))
        self._rewrite()

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """There is one file per run folder."""
        return ""

    def typed_rows(self) -> list[dict[str, Any]]:
        """The rows so far with the values that were logged."""
        return [{name: _value(name, text) for name, text in row.items()} for row in self._rows]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is in config.yaml, not here."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append one row; a metric never seen before adds a column."""
        row = {"step": str(step)} | {name: str(value) for name, value in metrics.items()}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
        else:
            with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _rewrite(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self.path, text.getvalue())


def _value(name: str, text: str) -> int | float | str:
    if name in _TEXTS:
        return text
    return int(text) if text.isdigit() else float(text)


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Whole rows of a metrics.csv without their empty cells; [] where there is no file.

    Raises:
        InputError: it is damaged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
        steps = [int(row["step"]) for row in rows]
    except (UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError):
        steps = [0]
    if any(step < 1 for step in steps):
        raise InputError(f"{path}: is damaged; move it away to go on without the rows so far")
    whole = [
        row for row in rows if None not in row.values()
    ]  # an interrupted write leaves a short row, or no line end
    return [{name: value for name, value in row.items() if value} for row in whole]
