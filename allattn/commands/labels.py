"""A pruning run is what its labels say, or it is refused before it begins.

The file of an ablation, conf/ablation/NAME.yaml, fixes the gate settings that it names and leaves the paper's
other techniques on; a study, conf/study/NAME.yaml, sweeps what its file says.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from allattn.commands.overrides import setting_of, values_of
from allattn.errors import InputError
from allattn.pruning.techniques import TECHNIQUES, techniques_off
from allattn.training.flat_names import flat

Settings = Mapping[str, Any]  # by dotted name
_SWEPT = "hydra.sweeper.params."
_ALL_ON = {"gates.lambda_warmup_steps": 1, "gates.initial_pi": 1.0, "gates.output_scaling": True}


def check_typed_labels(overrides: Sequence[Override], multirun: bool, conf: Path) -> None:
    """Refuse a command line that contradicts its own labels, before the first of its jobs.

    Args:
        overrides: as typed.
        multirun: whether a study's values are swept; without, one of its jobs may be named by them.
        conf: folder of the YAML files; what lies elsewhere is left to `check_labels`.

    Raises:
        InputError: names the label and the setting.
    """
    typed = {setting_of(override): values_of(override) for override in overrides}
    given = dict(typed)
    for study in typed.get("study", []) if multirun else []:
        said = _in_file(conf / "study" / f"{study}.yaml").items()
        swept = {name.removeprefix(_SWEPT): values for name, values in said if name.startswith(_SWEPT)}
        for name in swept.keys() & typed.keys():
            word = f"{name}={','.join(map(str, typed[name]))}"
            raise InputError(f"study={study} sweeps {name} itself: leave it out, or {word}")
        given |= {name: values.split(",") for name, values in swept.items()}
    gates = {name: values for name, values in given.items() if name.startswith("gates.") and values}
    for label in given.get("ablation", ["all_three"]):
        fixed = _in_file(conf / "ablation" / f"{label}.yaml")
        for values in product(*gates.values()):
            _check_ablation(label, fixed, dict(zip(gates, values, strict=True)))


def check_labels(config: DictConfig) -> None:
    """Refuse a job whose composed settings contradict its labels, wherever they come from.

    Raises:
        InputError: names the label and the setting.
    """
    hydra_config = HydraConfig.get()
    if "ablation" not in config:
        return
    choices, swept = hydra_config.runtime.choices, hydra_config.sweeper.params or {}
    settings = _flat(config)
    if "gates.lambda_max" in swept:
        idle = {"gates.target_sparsity": None, "gates.selection": "l0"}
        for name, needed in idle.items():
            if settings[name] != needed:
                raise InputError(
                    f"study={choices['study']} compares values of lambda, but {name}={settings[name]} takes "
                    "its place: leave one of them out"
                )
    places = [source.path for source in hydra_config.runtime.config_sources if source.schema == "file"]
    for place in places:
        if (file := Path(place) / "ablation" / f"{choices['ablation']}.yaml").is_file():
            _check_ablation(choices["ablation"], _in_file(file), settings)
            return


def _check_ablation(label: str, fixed: Settings, settings: Settings) -> None:
    """Refuse settings, all of them or those that were typed, that are not what an ablation's file says."""
    for name, value in fixed.items():
        if settings.get(name, value) != value:
            raise InputError(
                f"ablation={label} means {name}={value}, but the settings say {name}={settings[name]}: leave "
                f"{name} out, or give the ablation that fits"
            )
    learned = {"gates.selection": "l0"}
    meant = techniques_off({**learned, **_ALL_ON, **fixed})
    off = techniques_off({**learned, **fixed, **settings})
    for technique in TECHNIQUES:
        if technique in off and technique not in meant:
            raise InputError(
                f"ablation={label} has {technique}, but the settings turn it off "
                f"({_said(technique, settings)}): leave that out, or give the ablation that fits"
            )
        if technique in meant and technique not in off:
            raise InputError(
                f"ablation={label} is about {technique}, which gates.selection="
                f"{settings['gates.selection']} does without: leave one of them out"
            )


def _said(technique: str, settings: Settings) -> str:
    name = list(_ALL_ON)[TECHNIQUES.index(technique)]
    return f"{name}={settings[name]}"


def _in_file(file: Path) -> dict[str, Any]:
    """What a group's file sets, by dotted name; nothing where there is no such file."""
    if not file.is_file():
        return {}
    return _flat(OmegaConf.load(file))


def _flat(config: Any) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config, enum_to_str=True)
    return dict(flat(values, "."))
