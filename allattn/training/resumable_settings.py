"""Which settings may change where a run goes on from what it saved.

Each setting of both commands is in one of these lists; a group's name stands for all its settings. One that
is in none of them is fixed. All but the free ones and those that go by content need resume=changed.
"""

from collections.abc import Mapping
from typing import Any

from allattn.errors import InputError
from allattn.pruning.phase import Phase
from allattn.training.flat_names import among, flat

# Change nothing about the run: where it lies, what is shown of it, where it is also logged.
FREE = (
    "name",
    "runs_folder",
    "resume",
    "logger",
    "trainer.progress",
    "trainer.peak_flops",
    "data.cache_folder",
)
# What counts is what they lead to: the text's fingerprint and the vocabulary's hash.
TEXT = (
    "data.source",
    "data.folder",
    "data.train_file",
    "data.valid_file",
    "data.test_file",
    "data.tokenizer",
    "data.vocabulary_size",
    "data.minimum_count",
)
BY_CONTENT = (*TEXT, "checkpoint")  # the dense checkpoint too, by its hash
# Change no number beyond rounding, but for dropout: its noise is drawn by process and micro-batch.
WITHOUT_EFFECT = (
    "eval.rows",
    "eval.segment_length",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.accumulation",
    "trainer.compile",
    "trainer.core",
    "trainer.log_interval",
    "trainer.checkpoint_interval",
)
# Hold from the next step on.
TAKES_EFFECT = (
    "optimizer.learning_rate",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.gradient_clip",
    "schedule.batch_size",
    "schedule.segment_length",
    "schedule.steps",
    "schedule.warmup_steps",
    "schedule.shape",
    "schedule.final_ratio",
    "schedule.tokens",
    "schedule.warmup_tokens",
    "distill.weight",
    "distill.temperature",
    "eval.interval",
    "trainer.precision",
)
# Hold from the next step on while there are gates; fixed after the freeze.
WITH_GATES = (
    "gates.lambda_max",
    "gates.lambda_warmup_steps",
    "gates.freeze_step",
    "gates.output_scaling",
    "gates.scale_gradient",
    "gates.beta",
    "gates.gamma",
    "gates.zeta",
    "gates.threshold",
    "gates.penalty",
    "gates.learning_rate_ratio",
    "gates.target_sparsity",
    "gates.target_gain",
    "gates.train",
    "distill.gates",
)
# What was saved is of them: weights, noise, the gates' beginning, the label; and how the best validation loss
# was measured, which later ones are compared with.
FIXED = (
    "seed",
    "model",
    "optimizer.name",
    "ablation",
    "gates.initial_pi",
    "gates.selection",
    "gates.scope",
    "gates.unit",
    "gates.train_after",
    "gates.removal",
    "gates.selection_steps",
    "gates.iterations",
    "eval.memory_length",
    "eval.mode",
    "eval.context",
    "eval.stride",
)

Changes = Mapping[str, str]  # "old -> new" by setting


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> Changes:
    """What differs between two configurations, free settings left out.

    A setting that the saved one lacks, as it is of an earlier version, had its default.
    """
    old, new = dict(flat(defaults, ".")) | dict(flat(saved, ".")), dict(flat(now, "."))
    return {
        name: f"{old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not among(name, FREE)
    }


def chosen(differing: Changes, settings: tuple[str, ...]) -> Changes:
    """Those changes whose setting, or its group, is in a list."""
    return {name: change for name, change in differing.items() if among(name, settings)}


def listed(differing: Changes) -> str:
    """The changes in one line."""
    return "; ".join(f"{name}: {change}" for name, change in differing.items())


def fixed(differing: Changes) -> list[str]:
    """Names of those that may not change once something is saved."""
    may = (*BY_CONTENT, *WITHOUT_EFFECT, *TAKES_EFFECT, *WITH_GATES)
    return [name for name in differing if not among(name, may)]


def refuse_late_changes(differing: Changes, meta: Mapping[str, Any], freeze_step: int) -> None:
    """Refuse settings of the gates that no step is left for.

    Args:
        differing: from `changes`.
        meta: what the run's last checkpoint says of phase and step.
        freeze_step: after which heads are removed, as the settings are now.

    Raises:
        InputError: names the settings.
    """
    late = dict(chosen(differing, WITH_GATES))
    if meta["phase"] == Phase.gates.value and meta["step"] < freeze_step:
        return
    if meta["phase"] == Phase.gates.value and meta["step"] == freeze_step:
        late.pop("gates.freeze_step", None)  # now
    if late:
        raise InputError(
            f"{listed(late)}: after {meta['step']} steps there is no step with gates left to follow this; "
            "leave it as it was, or give this run another name="
        )
