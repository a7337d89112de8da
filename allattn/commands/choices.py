"""Groups of settings on a command line, as experiment=demo: a file of conf/ stands behind each choice."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from allattn.commands.mistakes import no_such_setting, stands_for_several
from allattn.commands.overrides import Kinds, setting_of, values_of
from allattn.errors import InputError


def groups_of(file: Path) -> set[str]:
    """Groups that a command's own file makes a choice of; none where the command has no file."""
    defaults = OmegaConf.load(file).defaults if file.is_file() else []
    return {str(group) for entry in defaults if isinstance(entry, DictConfig) for group in entry}


def check_choices(overrides: Sequence[Override], kinds: Kinds, groups: set[str], conf: Path) -> None:
    """Refuse what names a group or a setting in a way that Hydra answers in its own terms, or with none.

    Args:
        overrides: as typed.
        kinds: declared type of each setting of the command.
        groups: of the command.
        conf: folder of the groups' files; another one, of the user, may hold more of them.

    Raises:
        InputError: names the override and what to type.
    """
    for override in overrides:
        name, word = setting_of(override), override.input_line
        if name.partition("/")[0].partition(".")[0] == "hydra":
            continue
        if override.package is not None:
            raise InputError(f"{word}: is no setting; settings are given as name=value")
        value = str(word).partition("=")[2]
        if name in groups:
            if override.is_add() or override.is_force_add():
                raise InputError(f"{word}: a choice of {name} is made already: give {name}={value}")
            if not all(isinstance(getattr(one, "text", one), str | dict) for one in values_of(override)):
                choices = ", ".join(sorted(path.stem for path in (conf / name).glob("*.yaml")))
                raise InputError(f"{word}: {name} takes one choice; there are {choices}")
        elif name in kinds:
            if override.is_add():
                raise InputError(f"{word}: the setting is there already: give {name}={value}")
        else:
            _check_unknown(override, kinds, conf)


def _check_unknown(override: Override, kinds: Kinds, conf: Path) -> None:
    name, values = setting_of(override), values_of(override)
    if any(known.startswith(f"{name}.") for known in kinds):
        if not all(isinstance(value, dict) for value in values):
            raise InputError(stands_for_several(name, kinds))
        return
    above = [outer for outer in kinds if name.startswith(f"{outer}.")]
    inside = any(not _is_list(kinds, outer) for outer in above)
    by_hydra = "." in name or all(
        isinstance(value, str) for value in values
    )  # a group of the user's, perhaps
    if inside or (conf / name).is_dir() or not by_hydra:
        raise InputError(no_such_setting(name, kinds))


def _is_list(kinds: Mapping[str, Any], name: str) -> bool:
    return "list" in str(kinds[name])
