"""Settings as they are typed: what Hydra's grammar would misread, and the quotes that it needs."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from allattn.errors import InputError

# Flags of Hydra that a value follows; `--flag=value` is one word.
_WITH_VALUE = {"-p", "-cp", "-cn", "-cd", "-c", "-i"}
_WITH_VALUE |= {"--package", "--config-path", "--config-name", "--config-dir", "--cfg", "--info"}
_WITH_VALUE |= {"--experimental-rerun"}
Kinds = Mapping[str, Any]  # declared type of each setting, by dotted name


def quoted(override: str) -> str:
    """`name=value` with the value in quotes, so that Hydra takes every character of it as it is."""
    name, _, value = override.partition("=")
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value)
    return f'{name}="{value}"'


def with_quoted_home(arguments: Sequence[str]) -> list[str]:
    """A value that begins with `~`, which only a path does, in quotes."""
    return [quoted(word) if re.match(r"[^-=~][^=]*=~", word) else word for word in arguments]


def with_lists(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """`name=A` and `name=A,B` written as `name=[A]` and `name=[A,B]`, for the settings that are lists."""
    found = []
    for word in arguments:
        name, equals, value = word.partition("=")
        bare = equals and name in names and not value.startswith("[")
        found.append(f"{name}=[{value}]" if bare else word)
    return found


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The command line with its flags, and the words that belong to them, before all settings.

    Hydra's parser takes no settings on both sides of a flag.
    """
    is_flag = [
        word.startswith("-") or before in _WITH_VALUE
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    marked = list(zip(is_flag, arguments, strict=True))
    return [word for flag, word in marked if flag] + [word for flag, word in marked if not flag]


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for a run with each of several values."""
    return bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def parsed(arguments: Sequence[str], kinds: Kinds) -> list[Override]:
    """The settings on a command line, as Hydra reads them.

    Raises:
        InputError: one cannot be read, or would be read as something else than the text that it is.
    """
    parser = OverridesParser.create()
    multirun = is_multirun(arguments)
    found = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word.startswith("-") or before in _WITH_VALUE:
            continue
        try:
            override = parser.parse_override(word)
        except HydraException:
            raise InputError(_unreadable(word, kinds)) from None
        if not setting_of(override):
            raise InputError(_unreadable(word, kinds))
        if override.is_delete():
            raise InputError(f"{word}: no setting can be taken away; give it a value, as name=value")
        _check_meaning(override, word, kinds.get(setting_of(override)), multirun)
        found.append(override)
    return found


def setting_of(override: Override) -> str:
    """The dotted name of the setting that an override gives, or the group."""
    return override.key_or_group


def values_of(override: Override) -> list[Any]:
    """The value that an override gives, or those that it sweeps over; none where only Hydra knows them."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
        return []
    return [getattr(value, "text", value) for value in override.sweep_iterator()]


def _check_meaning(override: Override, word: str, kind: Any, multirun: bool) -> None:
    text = kind in (str, str | None)
    if override.is_sweep_override():
        if multirun:
            return
        alone = f", or as one text: {shlex.quote(quoted(word))}" if text else ""
        alone = alone or (", or as a list: [...]" if _is_list(kind) else "")
        raise InputError(f"{word}: gives several values; add -m for a run with each of them{alone}")
    value = override.value()
    typed = word.partition("=")[2]
    if text and not (value is None or isinstance(value, str) or str(value) == typed):
        raise InputError(
            f"{word}: is read as {value!r}, not as text; put it in quotes: {shlex.quote(quoted(word))}"
        )


def _unreadable(word: str, kinds: Kinds) -> str:
    name, equals, value = word.partition("=")
    name = name.lstrip("+")
    if not equals or not re.fullmatch(r"[\w./@:-]+", name, re.ASCII):
        return f"{word}: is no setting; settings are given as name=value"
    listed = re.fullmatch(r"\[(.*)\]", value)
    if listed and _is_list(kinds.get(name)):
        each = ",".join(quoted(f"={one}")[1:] for one in listed[1].split(","))
        suggested = f"{word.partition('=')[0]}=[{each}]"
    else:
        suggested = quoted(word)
    return f"{word}: holds characters with a meaning of their own; put it in quotes: {shlex.quote(suggested)}"


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list or any(
        getattr(one, "__origin__", None) is list for one in getattr(kind, "__args__", ())
    )
