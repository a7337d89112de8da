"""The two ways in which a command ends early without being at fault."""

import math
from dataclasses import fields
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """A signal stopped a run after it was saved; `number` is the signal's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def refuse_non_finite(group: str, settings: Any) -> None:
    """Refuse NaN and infinity, which pass every comparison, among a dataclass's settings.

    Raises:
        InputError: names the setting.
    """
    for name, value in vars(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{group}.{name}={value}: must be a finite number")


def refuse_wrong_kinds(group: str, settings: Any) -> None:
    """Refuse values that are not of a dataclass's declared types: it may come from a file of a stranger.

    Raises:
        InputError: names the setting.
    """
    kinds = get_type_hints(type(settings))
    for name in (field.name for field in fields(settings)):
        value = getattr(settings, name)
        if not fits_kind(value, kinds[name]):
            raise InputError(f"{group}.{name}={str(value)[:40]!r} is not of the right kind")


def fits_kind(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type: a plain one, a list, an enum, or one of several."""
    if isinstance(kind, UnionType):
        return any(fits_kind(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        return isinstance(value, list) and all(fits_kind(item, inner) for item in value)
    if kind is float:
        return type(value) in (int, float)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return isinstance(value, kind)
    return type(value) is kind
