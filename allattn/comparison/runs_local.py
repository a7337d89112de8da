"""Finished runs in local folders, for a comparison."""

import csv
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from allattn.comparison.compared_run import Damaged, FinishedRun, LeftOut, finished_run
from allattn.comparison.records import is_of_a_stage, read_each, read_json
from allattn.errors import InputError, first_line
from allattn.training.metrics import read_metrics


def read_local_runs(
    folders: Iterable[Path], group: str | None = None
) -> tuple[list[FinishedRun], list[LeftOut]]:
    """Finished runs below the folders, pruned and dense, and the others with the reason for it.

    Args:
        folders: looked through with everything below them.
        group: only runs with this `logger.group`; None = all.

    Raises:
        InputError: a folder does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"runs={folder}: there is no such folder")
        found |= {path.parent for path in folder.rglob("config.yaml") if not _is_of_a_tool(path)}
    return read_each((str(path), partial(_read_run, path, group)) for path in sorted(found))


def _is_of_a_tool(path: Path) -> bool:
    """W&B and Hydra keep files of the same name inside a run's folder."""
    return path.parent.name == ".hydra" or path.match("wandb/*/files/config.yaml")


def _group(config: dict[str, Any]) -> Any:
    logger = config.get("logger")
    return logger.get("group") if isinstance(logger, dict) else None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Damaged(f"config.yaml cannot be read ({first_line(error)})") from None
    if not isinstance(config, dict):
        raise Damaged("config.yaml cannot be read (it holds no settings)")
    return config


def _read_run(folder: Path, group: str | None) -> FinishedRun | None:
    config = _read_config(folder)
    if not is_of_a_stage(config) or group not in (None, _group(config)):
        return None
    result = folder / "result.json"
    if not result.exists():
        raise Damaged(_why_unfinished(folder))
    record = read_json(result)
    articles, tasks = (
        read_json(kept) if (kept := folder / name).exists() else None
        for name in ("articles.json", "lm_eval.json")
    )
    metrics = folder / "metrics.csv"
    try:
        history = read_metrics(metrics)
    except (OSError, ValueError, csv.Error) as error:
        raise Damaged(f"metrics.csv cannot be read ({first_line(error)})") from None
    if metrics.exists() and history and "step" not in history[0]:
        raise Damaged("metrics.csv cannot be read (it has no column step)")
    name = str(config.get("name", folder.name))
    return finished_run(name, str(folder), config, record, history, articles, tasks)


def _why_unfinished(folder: Path) -> str:
    failure = folder / "failure.txt"
    if not failure.exists():
        return "unfinished"
    try:
        lines = failure.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = [""]
    return f"failed: {lines[0].strip()}" if lines[0].strip() else "failed"
