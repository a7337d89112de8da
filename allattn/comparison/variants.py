"""Which runs are one variant or one method of a study, how they are called, and what else differs.

Runs of one variant have the same settings of the gates. A method is a variant without what only says how many
heads go: runs of one method at several lambdas, or several targets, lie on one curve.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from allattn.comparison.compared_run import ComparedRun, ModelFacts
from allattn.pruning.config import GatesConfig
from allattn.pruning.techniques import TECHNIQUES, techniques_off
from allattn.training.flat_names import among

FULL = "full method"
NONE_OF_THREE = "without all three"

# What the settings must hold where the free-text setting `ablation` has one of the paper's names.
_LABELS = {
    "all_three": [],
    "no_lambda_warmup": [TECHNIQUES[0]],
    "no_positive_init": [TECHNIQUES[1]],
    "no_output_scaling": [TECHNIQUES[2]],
    "none_of_three": list(TECHNIQUES),
}
# Short names of the settings that a study varies most.
_NAMES = {
    "gates.lambda_max": "lambda",
    "gates.lambda_warmup_steps": "lambda warm-up steps",
    "gates.initial_pi": "initial pi",
    "gates.target_sparsity": "target",
    "distill.weight": "distillation",
    "distill.gates": "distilled gate phase",
}
_DIALS = ("gates.lambda_max", "gates.target_sparsity")  # they move a run along its method's curve
# These act only where gates do not learn, and the others only where they do.
_OF_SELECTIONS = {"gates.scope", "gates.selection_steps", "gates.iterations"}
_OF_LEARNED_GATES = {
    f"gates.{name}"
    for name in GatesConfig.__dataclass_fields__
    if name not in ("output_scaling", "selection", "target_sparsity")
} - _OF_SELECTIONS
# Settings that change no number of a run, or are its mere label.
_WITHOUT_EFFECT = (
    "ablation",
    "data.cache_folder",
    "logger",
    "name",
    "resume",
    "runs_folder",
    "seed",
    "trainer.checkpoint_interval",
    "trainer.log_interval",
    "trainer.progress",
)
_PAPER = {f"gates.{name}": getattr(value, "value", value) for name, value in asdict(GatesConfig()).items()}


def compared_settings(settings: Mapping[str, Any], vary: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that make a run's variant: those of gates and teacher that act, and those below `vary`.

    Args:
        settings: by dotted name.
        vary: further settings or groups whose values make variants.
    """
    learned = settings.get("gates.selection") == "l0"
    idle = _OF_SELECTIONS if learned else _OF_LEARNED_GATES
    if settings.get("gates.selection") != "iterative":
        idle = {*idle, "gates.iterations"}
    if settings.get("gates.target_sparsity") is None:
        idle = {*idle, "gates.target_gain"}
    if not settings.get("distill.weight"):
        idle = {*idle, "distill.weight", "distill.temperature", "distill.gates"}
    elif not learned or not settings.get("distill.gates"):
        idle = {*idle, "distill.gates"}
    return {
        name: value
        for name, value in settings.items()
        if (among(name, ("gates", "distill")) and name not in idle) or among(name, vary)
    }


def without_dials(compared: Mapping[str, Any]) -> dict[str, Any]:
    """Of the compared settings, those that make a run's method: neither lambda nor the target's value.

    Gates that learn towards a target and gates under a given lambda are two methods.
    """
    rest = {name: value for name, value in compared.items() if name not in _DIALS}
    if compared.get("gates.selection") == "l0":
        rest["gates.target_sparsity"] = compared.get("gates.target_sparsity") is not None
    return rest


def reference_settings(runs: Sequence[ComparedRun], vary: Sequence[str] = ()) -> dict[str, Any] | None:
    """The compared settings of the full method: all three techniques on, gates learned.

    Where a study has several such settings (a sweep), the one with most runs; then the one that differs
    least from the paper's; then the first by name. None where no run is of the full method.
    """
    full = [
        compared_settings(run.settings, vary)
        for run in runs
        if run.settings["gates.selection"] == "l0" and not techniques_off(run.settings)
    ]
    if not full:
        return None
    count = Counter(map(_key, full))

    def rank(settings: dict[str, Any]) -> tuple[int, int, str]:
        unlike = sum(name in _PAPER and not _same(value, _PAPER[name]) for name, value in settings.items())
        return -count[_key(settings)], unlike, _key(settings)

    return min(full, key=rank)


def variant_names(runs: Sequence[ComparedRun], vary: Sequence[str] = ()) -> list[str]:
    """The variant of each run, in words: techniques that are off, then settings unlike the full method's.

    Without a run of the full method the settings that are not the same in all runs are named.
    """
    compared = [compared_settings(run.settings, vary) for run in runs]
    return _names(runs, compared, reference_settings(runs, vary))


def method_names(runs: Sequence[ComparedRun], vary: Sequence[str] = ()) -> list[str]:
    """The method of each run, in the same words."""
    compared = [without_dials(compared_settings(run.settings, vary)) for run in runs]
    reference = reference_settings(runs, vary)
    return _names(runs, compared, None if reference is None else without_dials(reference))


def model_names(models: Sequence[ModelFacts]) -> list[str]:
    """The family of each model and, where a family has several sizes, its layers' parameters."""
    sizes: dict[str, set[int]] = {}
    for model in models:
        sizes.setdefault(model.family, set()).add(model.layer_parameters)
    return [
        model.family if len(sizes[model.family]) == 1 else f"{model.family} of {model.layer_parameters:,}"
        for model in models
    ]


def _names(
    runs: Sequence[ComparedRun], compared: list[dict[str, Any]], reference: dict[str, Any] | None
) -> list[str]:
    if reference is None:
        names = {name for settings in compared for name in settings}
        reference = {
            name: compared[0].get(name)
            for name in names
            if all(_same(settings.get(name), compared[0].get(name)) for settings in compared)
        }
    return [
        _variant_name(run.settings, settings, reference) for run, settings in zip(runs, compared, strict=True)
    ]


def _variant_name(settings: Mapping[str, Any], compared: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    off = techniques_off(settings)
    learned = settings["gates.selection"] == "l0"
    parts = [] if learned else [f"{settings['gates.selection']} selection"]
    parts += [NONE_OF_THREE] if len(off) == len(TECHNIQUES) else [f"without {name}" for name in off]
    said = {"gates.selection"}
    said |= {"gates.lambda_warmup_steps"} if TECHNIQUES[0] in off else set()
    said |= {"gates.initial_pi"} if TECHNIQUES[1] in off and settings.get("gates.initial_pi") == 0 else set()
    said |= {"gates.output_scaling"} if TECHNIQUES[2] in off else set()
    parts += [
        setting_in_words(name, value)
        for name, value in sorted(compared.items())
        if name not in said and not _same(value, shared.get(name, _PAPER.get(name)))
    ]
    return ", ".join(parts) or FULL


def setting_in_words(name: str, value: Any) -> str:
    """A setting and its value as a variant's name says it."""
    words = _NAMES.get(name) or name.rpartition(".")[2].replace("_", " ")
    if value is None:
        return f"no {words}"
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {_said(value)}"


def variant_order(name: str) -> tuple[int, str]:
    """Sorts the full method first, then the paper's ablations in its order, then the others by name."""
    paper = [FULL, *(f"without {technique}" for technique in TECHNIQUES), NONE_OF_THREE]
    return (paper.index(name) if name in paper else len(paper), name)


def mislabelled(run: ComparedRun) -> bool:
    """Whether `ablation` names other techniques than the settings switch off."""
    label = run.settings.get("ablation")
    learned = run.settings["gates.selection"] == "l0"
    return learned and label in _LABELS and _LABELS[label] != techniques_off(run.settings)


def shared_settings(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Settings that all runs have with the same value, in words, without those that change no number."""
    first = runs[0].settings
    return {
        name: _said(value)
        for name, value in sorted(first.items())
        if not among(name, _WITHOUT_EFFECT)
        and all(name in run.settings and _same(run.settings[name], value) for run in runs)
    }


def unexpected_differences(runs: Sequence[ComparedRun], vary: Sequence[str] = ()) -> list[str]:
    """One line per setting that differs between runs without being a compared one: who has which value.

    A checkpoint of its own for every seed and dense model is no such difference: pairs of one seed share it.
    """
    pairs = {run.where: (run.seed, run.dense.family, run.dense.layer_parameters) for run in runs}
    names = sorted({name for run in runs for name in run.settings})
    lines = []
    for name in names:
        if among(name, (*_WITHOUT_EFFECT, "gates", "distill", *vary)):
            continue
        values = {run.where: _said(run.settings.get(name)) for run in runs}
        if len(set(values.values())) == 1:
            continue
        if name == "checkpoint" and all(
            len({values[where] for where, own in pairs.items() if own == pair}) == 1
            for pair in set(pairs.values())
        ):
            continue
        usual = Counter(values.values()).most_common(1)[0][0]
        others = [
            f"{value} in {', '.join(run.name for run in runs if values[run.where] == value)}"
            for value in sorted(set(values.values()) - {usual})
        ]
        lines.append(f"{name} differs: {'; '.join(others)}; {usual} in the others")
    return lines


def _said(value: Any) -> str:
    """A value as text; JSON turns 1.0 into 1 on its way through W&B, so both read the same."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{', '.join(map(_said, value))}]"
    return "none" if value is None else str(value)


def _key(settings: Mapping[str, Any]) -> str:
    return str(sorted((name, _said(value)) for name, value in settings.items()))


def _same(one: Any, other: Any) -> bool:
    return _said(one) == _said(other)
