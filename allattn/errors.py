"""The two ways in which a command ends early without being at fault."""

import math
from typing import Any


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """A signal stopped a run after it was saved; `number` is the signal's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def refuse_non_finite(group: str, settings: Any) -> None:
    """Refuse NaN and infinity, which pass every comparison, among a dataclass's settings.

    Raises:
        InputError: names the setting.
    """
    for name, value in vars(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{group}.{name}={value}: must be a finite number")
