"""What lm-evaluation-harness found of a model, as `allattn lm-eval` keeps it beside result.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUMBER = "{task} {metric}"  # name of a number, and of its column
_HOW = ("documents", "few_shot", "versions")  # by task
_HOW_ALL = ("max_length", "seed")  # of all tasks


@dataclass(frozen=True)
class TaskResults:
    """One model's numbers."""

    values: dict[str, float] = field(default_factory=dict)  # finite, by NUMBER, without standard errors
    how: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: what its numbers depend on


def task_results(record: Mapping[str, Any]) -> TaskResults:
    """From the content of lm_eval.json.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not such a record.
    """
    values = {
        NUMBER.format(task=task, metric=metric): float(value)
        for task, numbers in record["tasks"].items()
        for metric, value in numbers.items()
        if "_stderr" not in metric
    }
    how = {
        task: {name: record.get(name, {}).get(task) for name in _HOW}
        | {name: record.get(name) for name in _HOW_ALL}
        for task in record["tasks"]
    }
    return TaskResults({name: value for name, value in values.items() if math.isfinite(value)}, how)


def run_otherwise(results: Sequence[TaskResults]) -> list[str]:
    """A line per task whose numbers the models do not owe to the same documents, examples and windows."""
    lines = []
    for task in dict.fromkeys(task for each in results for task in each.how):
        ways = [each.how[task] for each in results if task in each.how]
        unlike = [name for name in ways[0] if any(way[name] != ways[0][name] for way in ways)]
        if unlike:
            lines.append(f"{task}: its results were not all measured with the same {', '.join(unlike)}")
    return lines
