"""The one exception for input that a person can correct."""


class InputError(ValueError):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with status 2.
    """
