"""Mistakes in the settings, each answered in one line."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from allattn.commands.overrides import Kinds
from allattn.errors import InputError, first_line


def refuse_unknown(config: DictConfig, schema: type) -> None:
    """Hydra lets `+key=value` add what no dataclass has; nothing would ever read it.

    Raises:
        InputError: a setting is not one of the schema's; the nearest one is named.
    """
    known = setting_kinds(schema)
    for name in _leaves(config):
        if name not in known:
            raise InputError(no_such_setting(name, known))


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
    """One line about a configuration error: the setting, what it was given, and what it takes."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _no_such_choice(error.missing_cfg_file, error.options)
    kinds = setting_kinds(schema)
    lines = [line.strip() for cause in _causes(error) for line in str(cause).splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line and not _is_noise(line)))
    if group := re.search(r"override ([\w.]+)=.*; Invalid type assigned: \w+ is not a subclass of", text):
        return stands_for_several(group[1], kinds)
    if about := _about_a_setting(error, text, kinds):
        return about
    unknown = re.search(r"[Kk]ey '([\w.]+)' (?:is )?not in", text)
    if unknown is None:
        return text
    override = re.search(r"Could not (?:override|append to config\.?|.*?) '?\+*([\w.]+)'?", text)
    return no_such_setting(override.group(1) if override else unknown.group(1), kinds)


def _about_a_setting(error: Exception, text: str, kinds: Kinds) -> str | None:
    """Of a value that a setting does not take, or that refers to what is not there."""
    missing = re.search(r"missing mandatory value: (\w+)", text)
    if missing:
        return f"{missing[1]}: has no value; give one"
    for cause in _causes(error):
        noted = re.search(r"full_key: (\S+)", str(cause))
        name = re.sub(r"\[\d+\]$", "", str(getattr(cause, "full_key", None) or (noted[1] if noted else "")))
        if name not in kinds:
            continue
        typed, file = re.search(r"Error merging override (.*?)(?:; |$)", text), re.match(r"In '(.+?)'", text)
        given = typed[1] if typed else f"{file[1]}.yaml: {name}" if file else name
        if isinstance(cause, InterpolationResolutionError):
            return f"{given}: refers to what is not there ({first_line(cause)})"
        value = re.search(r"[Vv]alue '(.*?)'", text)
        given += f"={value[1]}" if value and not typed else ""
        return f"{given}: must be {in_words(kinds[name])}"
    return None


def in_words(kind: Any) -> str:
    """What a setting of a declared type takes."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if isinstance(kind, UnionType):
        return " or ".join(in_words(one) for one in get_args(kind))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        return f"a list, as [a,b], each {in_words(inner)}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    return plain[kind]


def stands_for_several(name: str, kinds: Kinds) -> str:
    """One line about a value for a group of settings that no file gives."""
    inner = next(known for known in kinds if known.startswith(f"{name}."))
    return f"{name} stands for several settings: give one of them, as {inner}=..."


def no_such_setting(wanted: str, kinds: Kinds) -> str:
    """One line about an unknown setting, with the nearest one there is."""
    names = list(kinds)
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
