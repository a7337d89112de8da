"""What reading finished runs has in common, wherever their records are kept."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from allattn.comparison.compared_run import (
    Damaged,
    FinishedRun,
    LeftOut,
    is_pretraining_run,
    is_pruning_run,
)
from allattn.errors import first_line


def read_each(
    found: Iterable[tuple[str, Callable[[], FinishedRun | None]]],
) -> tuple[list[FinishedRun], list[LeftOut]]:
    """The runs that can be read, and the others with the reason for it.

    Args:
        found: of each run how to find it again, and what reads it: None where it is not asked for.
    """
    runs, left_out = [], []
    for where, read in found:
        try:
            run = read()
        except Damaged as damage:
            left_out.append(LeftOut(where, str(damage)))
        else:
            runs += [] if run is None else [run]
    return runs, left_out


def is_of_a_stage(config: Any) -> bool:
    """Whether a configuration is that of a pruning or a pretraining run."""
    return is_pruning_run(config) or is_pretraining_run(config)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        Damaged: there is none.
    """
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read ({first_line(error)})") from None
    if not isinstance(record, dict):
        raise Damaged(f"{path.name} cannot be read (it holds no object)")
    return record
