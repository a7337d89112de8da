"""Tasks of lm-evaluation-harness on a model that the harness takes, and their numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from allattn.errors import InputError, first_line


def run_tasks(
    model: LM, tasks: Sequence[str], limit: int | None, few_shot: int | None, seed: int, draws: int
) -> dict[str, Any]:
    """What the harness says of a model.

    Args:
        model: as the harness takes it.
        tasks: of the harness by name, or YAML files.
        limit: of the documents of a task; None = all.
        few_shot: solved examples before the question; None = as the task says.
        seed: of the examples and of generation.
        draws: of the bootstrap behind the standard errors.

    Raises:
        InputError: a task cannot be run.
    """
    by_name = any(not Path(task).is_file() for task in tasks)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=TaskManager(include_defaults=by_name),
            limit=limit,
            num_fewshot=few_shot,
            log_samples=False,
            bootstrap_iters=draws,
            **dict.fromkeys(seeds, seed),
        )
    except Exception as error:  # of a task's file, its data or its name
        raise InputError(
            f"tasks={','.join(tasks)}: lm-evaluation-harness cannot run them "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    assert found is not None
    return dict(found)


def numbers_by_task(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of `run_tasks` by task and metric; standard errors end in `_stderr`."""
    tasks: dict[str, dict[str, float]] = {}
    for task, values in found["results"].items():
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        tasks[task] = {
            name.removesuffix(",none").replace(",", " "): float(value)
            for name, value in numbers.items()
            if "," in name
        }
    return tasks
