"""A text as sequences for a study: rows side by side that carry memory, or windows that begin without."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from allattn.data.segments import EvaluationStream, Ids, WindowStream
from allattn.errors import InputError
from allattn.heads.watched import Batch
from allattn.training.batches import as_batches


@dataclass(frozen=True)
class Text:
    """What is read, the same at every reading."""

    batches: Callable[[], Iterable[Batch]]
    memory: bool  # whether it is carried from one batch to the next
    tokens: int  # scored
    length: int  # tokens of a sequence
    fingerprint: str  # of the ids that are read

    @property
    def said(self) -> str:
        """What it is, in words."""
        kind = "with the memory of those before" if self.memory else "each without memory"
        return (
            f"{self.tokens:,} tokens scored in sequences of {self.length}, {kind} "
            f"(SHA-256 {self.fingerprint[:12]})"
        )

    def about(self) -> dict[str, object]:
        """What a measurement on it depends on."""
        return {
            "fingerprint": self.fingerprint,
            "tokens": self.tokens,
            "length": self.length,
            "memory": self.memory,
        }


def first_tokens(ids: Ids, setting: str, tokens: int | None, length: int) -> Ids:
    """The beginning of a text with `tokens` tokens that can be scored; None = all of it.

    Args:
        ids: (N,) the text.
        setting: calibration or test, for the error.
        tokens: to score; the text's first one is read only.
        length: of a sequence.

    Raises:
        InputError: the text has fewer, or not one whole sequence.
    """
    there = len(ids) - 1
    if there < length:
        raise InputError(
            f"the {setting} text has {max(0, there)} tokens to score, less than one sequence of "
            f"length={length}: lower length, or take a longer text"
        )
    if tokens is not None and tokens > there:
        raise InputError(
            f"{setting}.tokens={tokens}: the text has {there} tokens to score; lower it or take a longer text"
        )
    return ids if tokens is None else ids[: tokens + 1]


def refuse_same(calibration: Ids, test: Ids) -> None:
    """Refuse a test text that begins as the calibration text does.

    Raises:
        InputError: the shorter one is the beginning of the longer one.
    """
    shorter = min(len(calibration), len(test))
    if np.array_equal(calibration[:shorter], test[:shorter]):
        raise InputError(
            "calibration and test are the same text, so thresholds and ranks would be taken from what they "
            "are tested on: choose another calibration.split or test.split, or say calibration.same=true"
        )


def with_memory(ids: Ids, rows: int, length: int, warm_up: int) -> Text:
    """A text in rows side by side, each token scored once, with the memory of those before it.

    Args:
        ids: (N,) the text.
        rows: side by side.
        length: tokens of a sequence.
        warm_up: tokens before each row's own that only fill the memory.
    """
    stream = EvaluationStream(ids, rows, length, warm_up)
    return Text(lambda: as_batches(stream), True, stream.scored, length, fingerprint_of(ids))


def in_windows(ids: Ids, rows: int, length: int) -> Text:
    """A text in windows of at most `length` tokens, nearly equal in length, each read without memory.

    Arguments as of `with_memory`; every token after the text's first is scored once.
    """
    stream = WindowStream(ids, rows, context=0, stride=length)
    return Text(lambda: as_batches(stream), False, stream.scored, length, fingerprint_of(ids))


def fingerprint_of(ids: Ids) -> str:
    """SHA-256 of the ids."""
    return sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).hexdigest()
