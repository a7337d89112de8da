"""The two ways in which a command ends early without being at fault."""


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """A signal stopped a run after it was saved; `number` is the signal's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
