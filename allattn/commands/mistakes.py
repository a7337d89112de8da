"""Mistakes in the settings, each answered in one line."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from allattn.errors import InputError


def refuse_unknown(config: DictConfig, schema: type) -> None:
    """Hydra lets `+key=value` add what no dataclass has; nothing would ever read it.

    Raises:
        InputError: a setting is not one of the schema's; the nearest one is named.
    """
    known = setting_kinds(schema)
    for name in _leaves(config):
        if name not in known:
            raise InputError(_no_such_setting(name, schema))


def refuse_missing(config: DictConfig, command: str) -> None:
    """Refuse a start without a setting that has no value of its own.

    Raises:
        InputError: names the first one.
    """
    for name in map(str, config):
        if OmegaConf.is_missing(config, name):
            raise InputError(f"{command} needs {name}={'NAME' if name == 'name' else 'PATH'}")


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        inner = None if OmegaConf.is_missing(config, key) else config[key]
        if isinstance(inner, DictConfig):
            yield from _leaves(inner, f"{name}.")
        else:
            yield name


def explain(error: Exception, schema: type) -> str:
    """One line about a configuration error, with the nearest setting where a key is unknown."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _no_such_choice(error.missing_cfg_file, error.options)
    lines = [line.strip() for cause in _causes(error) for line in str(cause).splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line and not _is_noise(line)))
    if group := re.search(r"override ([\w.]+)=.*; Invalid type assigned: \w+ is not a subclass of", text):
        inner = [name for name in setting_kinds(schema) if name.startswith(f"{group[1]}.")]
        return f"{group[1]} stands for several settings: give one of them, as {inner[0]}=..."
    unknown = re.search(r"[Kk]ey '([\w.]+)' (?:is )?not in", text)
    if unknown is None:
        return text
    override = re.search(r"Could not (?:override|append to config\.?|.*?) '?\+*([\w.]+)'?", text)
    return _no_such_setting(override.group(1) if override else unknown.group(1), schema)


def _no_such_setting(wanted: str, schema: type) -> str:
    names = list(setting_kinds(schema))
    last = {name.rsplit(".", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(wanted, names, 1, 0.7)
    near = near or [last[key] for key in difflib.get_close_matches(wanted.rsplit(".", 1)[-1], last, 1, 0.5)]
    return f"there is no setting {wanted}" + (f"; did you mean {near[0]}?" if near else "")


def _no_such_choice(wanted: str, options: Sequence[str]) -> str:
    group, _, choice = wanted.rpartition("/")
    near = difflib.get_close_matches(choice, options, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(options)}"
    return f"there is no {group}={choice}; {hint}"


def _causes(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else [error, *_causes(error.__cause__)]


def _is_noise(line: str) -> bool:
    return line.startswith(("object_type=", "full_key:", "To append to your config", "reference_type="))


def setting_kinds(schema: type, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all settings of a dataclass, with their declared types."""
    kinds: dict[str, Any] = {}
    for entry in fields(schema):
        name = f"{prefix}{entry.name}"
        if isinstance(entry.type, type) and is_dataclass(entry.type):
            kinds |= setting_kinds(entry.type, f"{name}.")
        else:
            kinds[name] = entry.type
    return kinds
