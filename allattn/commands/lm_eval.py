"""A model on tasks of lm-evaluation-harness: allattn lm-eval checkpoint=PATH tasks=NAME_OR_YAML_FILE."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from allattn.commands.opened import Opened, SavedSettings, open_saved
from allattn.commands.overrides import with_lists
from allattn.commands.run_command import Command
from allattn.errors import InputError, first_line
from allattn.families import all_attention
from allattn.files import write_atomically

RESULTS = "lm_eval.json"  # in the run's folder
DRAWS = 1000  # of the bootstrap behind the standard errors


@dataclass
class LmEvalSettings(SavedSettings):
    """Settings of the command."""

    tasks: list[str] = MISSING  # of the harness by name, or YAML files
    file: str | None = None  # JSON for the results; null = lm_eval.json in the run's folder
    limit: int | None = None  # of the documents of a task; null = all
    few_shot: int | None = None  # solved examples before the question; null = as the task says
    batch_size: int = 8  # texts at once
    max_length: int = 2048  # tokens of a window; a longer text is cut, and each window's memory begins empty
    seed: int = 1  # of the examples and of generation


def lm_eval(settings: LmEvalSettings) -> dict[str, Any]:
    """Run the tasks, print their numbers, and write them to a file.

    Raises:
        InputError: a setting, the model or a task cannot be used, the extra is not installed, or the file
            cannot be written.
    """
    _check(settings)
    try:
        from allattn.huggingface.harness import as_harness_model
        from allattn.huggingface.tasks import numbers_by_task, run_tasks
    except ImportError as error:
        raise InputError(f'{first_line(error)}; the command needs: pip install "allattn[lm-eval]"') from None
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    file = _file(settings, opened)
    hash_, length = opened.meta["tokenizer_hash"], settings.max_length
    ours = all_attention(opened.model, "lm-eval")
    model = as_harness_model(ours, opened.tokenizer(), hash_, settings.batch_size, length)
    found = run_tasks(model, settings.tasks, settings.limit, settings.few_shot, settings.seed, DRAWS)
    record = _record(settings, opened, found, numbers_by_task(found))
    for task, values in record["tasks"].items():
        print(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}")
    try:
        write_atomically(file, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"file={file}: cannot be written ({error.strerror})") from None
    return record


def _check(settings: LmEvalSettings) -> None:
    if not settings.tasks:
        raise InputError("tasks= is empty: name tasks of lm-evaluation-harness, or their YAML files")
    refuse_missing_files(settings.tasks)
    for name in ("batch_size", "max_length", "limit"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    for name in ("few_shot", "seed"):
        value = getattr(settings, name)
        if value is not None and value < 0:
            raise InputError(f"{name}={value}: must not be negative")


def refuse_missing_files(tasks: Sequence[str]) -> None:
    """Refuse YAML files of tasks that are not there.

    Raises:
        InputError: names the first one.
    """
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise InputError(f"tasks={task}: there is no such file")


def _file(settings: LmEvalSettings, opened: Opened) -> Path:
    if settings.file is not None:
        return Path(settings.file)
    run = opened.path.parent.parent
    if opened.path.name != "last.ckpt" or not (run / "result.json").is_file():
        raise InputError(
            f"{settings.checkpoint}: is not the last checkpoint of a finished run: give file=FILE.json"
        )
    return run / RESULTS


def _record(
    settings: LmEvalSettings, opened: Opened, found: Any, tasks: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """The numbers by task and metric, and what they depend on."""
    return {
        "checkpoint": str(opened.path),
        "phase": opened.meta["phase"],
        "tasks": tasks,
        "documents": {task: counts["effective"] for task, counts in found["n-samples"].items()},
        "few_shot": found["n-shot"],
        "versions": found["versions"],
        "max_length": settings.max_length,
        "seed": settings.seed,
    }


COMMAND = Command("lm-eval", LmEvalSettings, lm_eval, respelled=partial(with_lists, names=("tasks",)))
