"""Finished runs in local folders, for a comparison."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from allattn.comparison.compared_run import (
    Damaged,
    FinishedRun,
    LeftOut,
    finished_run,
    is_pretraining_run,
    is_pruning_run,
)
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
    runs, left_out = [], []
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"runs={folder}: there is no such folder")
        found |= {path.parent for path in folder.rglob("config.yaml") if not _is_of_a_tool(path)}
    for path in sorted(found):
        try:
            config = _read_config(path)
            of_a_stage = is_pruning_run(config) or is_pretraining_run(config)
            if of_a_stage and group in (None, _group(config)):
                runs.append(_read_run(path, config))
        except Damaged as damage:
            left_out.append(LeftOut(str(path), str(damage)))
    return runs, left_out


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


def _read_run(folder: Path, config: dict[str, Any]) -> FinishedRun:
    result = folder / "result.json"
    if not result.exists():
        raise Damaged(_why_unfinished(folder))
    record = _read_json(result)
    articles, tasks = (
        _read_json(kept) if (kept := folder / name).exists() else None
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read ({first_line(error)})") from None
    if not isinstance(record, dict):
        raise Damaged(f"{path.name} cannot be read (it holds no object)")
    return record


def _why_unfinished(folder: Path) -> str:
    failure = folder / "failure.txt"
    if not failure.exists():
        return "unfinished"
    try:
        lines = failure.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = [""]
    return f"failed: {lines[0].strip()}" if lines[0].strip() else "failed"
