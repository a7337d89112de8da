"""Going on from a checkpoint whose sections may be damaged: what no run can go on from is named, in one line.

Lightning and the optimizers take a section as it is: a moment of another shape would be noticed at the first
update, or never.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.errors import InputError, first_line

_RESTORED = {  # methods of Lightning's connector, and the section of a checkpoint that each takes
    "restore_precision_plugin_state": "state of the precision",
    "restore_model": "state_dict",
    "restore_callbacks": "callbacks",
    "restore_loops": "loops",
    "restore_optimizers": "optimizer_states",
    "restore_lr_schedulers": "lr_schedulers",
}
_NOT_ITS_FAULT = (InputError, OSError, MemoryError, torch.OutOfMemoryError)


class SectionError(Exception):
    """A section of a checkpoint is not what the run needs; the message is its name."""


def refusal(path: Path, section: str, why: str = "") -> InputError:
    """What to say of a checkpoint with a damaged section."""
    return InputError(
        f"{path}: is damaged: no run can go on from its {section}{why and f' ({why})'}; put another "
        "checkpoint of this run in its place, as best.ckpt, or give this run another name="
    )


def check_sections(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint after the first step whose sections are not whole in themselves.

    Raises:
        InputError: names the section.
    """
    checks: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "loops": _loops_say_the_step,
        "optimizer_states": _moments_fit_the_weights,
        "lr_schedulers": lambda each: each["lr_schedulers"] == [],  # learning rates follow from the step
        "callbacks": lambda each: isinstance(each.get("callbacks", {}), dict),
    }
    for section, is_whole in checks.items():
        try:
            whole = is_whole(checkpoint)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            whole = False
        if not whole:
            raise refusal(path, section)


def watch_restoring(connector: Any, path: Path) -> None:
    """Let an error while Lightning restores a section name the section.

    Args:
        connector: the trainer's, which restores from a checkpoint.
        path: of the checkpoint.
    """
    for method, section in _RESTORED.items():
        setattr(connector, method, _watched(getattr(connector, method), path, section))


def _watched(restore: Callable[..., Any], path: Path, section: str) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return restore(*args, **kwargs)
        except SectionError as error:
            raise refusal(path, str(error)) from error
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:
            raise refusal(path, section, f"{type(error).__name__}: {first_line(error)}") from error

    return watched


def _loops_say_the_step(checkpoint: Mapping[str, Any]) -> bool:
    loops = checkpoint["loops"]
    fit = loops["fit_loop"] if isinstance(loops, dict) else {}
    steps = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    batches = fit["epoch_loop.batch_progress"]
    counts = [n for kind in ("total", "current") for n in (batches[kind]["ready"], *batches[kind].values())]
    return steps == checkpoint["allattn"]["step"] and all(type(count) is int for count in counts)


def _moments_fit_the_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Whether each entry belongs to a weight, and those that are no single numbers have its shape."""
    weights = checkpoint["state_dict"]
    (state,) = checkpoint["optimizer_states"]
    names: dict[Any, str] = {}
    for group in state["param_groups"]:
        names |= dict(zip(group["params"], group["param_names"], strict=True))
    for number, entries in state["state"].items():
        name = names[number]
        weight = weights.get(f"model.{name}", weights.get(name))
        if not entries and weight.numel():
            return False
        if not all(_fits(value, weight) for value in entries.values()):
            return False
    return True


def _fits(value: Any, weight: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    if not value.ndim:
        return value.is_floating_point()
    return value.shape == weight.shape and value.is_floating_point() and bool(torch.isfinite(value).all())
