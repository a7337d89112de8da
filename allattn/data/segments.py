"""An id array as training streams that carry memory, and as rows that score a text exactly.

Notation: N tokens of the text, B streams over all processes and groups, T segment length, A accumulation
groups, R evaluation rows, b rows of this process.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from allattn.errors import InputError

NOT_SCORED = -100
Ids = npt.NDArray[np.int32]


class Segment(NamedTuple):
    """The next piece of b texts that are read side by side."""

    inputs: Tensor  # (b, T) int64
    targets: Tensor  # (b, T) int64: the token after each input, or NOT_SCORED
    group: int  # accumulation group: which streams, and so which memory
    starts_over: bool  # the texts begin here: memory must be emptied
    first: Tensor | None = None  # (b,) int64, in evaluation: where each row's first target is in the text


def stream_rows(streams: int, accumulation: int, group: int, rank: int, world_size: int) -> range:
    """Which of B streams a process reads in one group: B / (A * processes) in a row, group by group."""
    rows = streams // (accumulation * world_size)
    first = (group * world_size + rank) * rows
    return range(first, first + rows)


class SegmentStream:
    """Micro-batches of B contiguous streams; micro-batch m is a function of m alone.

    The text is cut into B streams of n = (N - 1) // B inputs, each with the token that follows as its last
    target. Optimizer step s reads segment s mod (n // T) of every stream; its B rows go to A groups, one per
    micro-batch, and each group's rows to the processes, in order.

    Args:
        ids: (N,) the training text.
        batch_size: B.
        segment_length: T.
        total: micro-batches of the whole run, steps * A.
        start: micro-batches of it that are already done.
        accumulation: A.
        rank: index of this process.
        world_size: number of processes.

    Raises:
        InputError: B cannot be shared out evenly, or the text is too short for B streams of T tokens.
    """

    def __init__(
        self,
        ids: Ids,
        batch_size: int,
        segment_length: int,
        total: int,
        start: int = 0,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size % (accumulation * world_size):
            raise InputError(
                f"schedule.batch_size={batch_size} is not divisible by trainer.accumulation={accumulation} "
                f"times {world_size} processes: every group of every process needs the same number of streams"
            )
        _check_stream(len(ids), batch_size, segment_length)
        self.ids = ids
        self.segment_length = segment_length
        self.total = total
        self.start = start
        self.accumulation = accumulation
        self.rows = [
            stream_rows(batch_size, accumulation, group, rank, world_size) for group in range(accumulation)
        ]
        self.stream_length = (len(ids) - 1) // batch_size  # n
        self.segments = self.stream_length // segment_length  # per epoch

    def __len__(self) -> int:
        """Micro-batches of the whole run, those before `start` included (Lightning counts from the first)."""
        return self.total

    def __iter__(self) -> Iterator[Segment]:
        return map(self.micro_batch, range(self.start, self.total))

    def micro_batch(self, index: int) -> Segment:
        """Micro-batch `index` of the run, on this process."""
        step, group = divmod(index, self.accumulation)
        segment = step % self.segments
        begins = np.asarray(self.rows[group]) * self.stream_length + segment * self.segment_length  # (b,)
        window = self.ids[begins[:, None] + np.arange(self.segment_length + 1)]  # (b, T + 1)
        tokens = torch.from_numpy(np.asarray(window, np.int64))
        return Segment(tokens[:, :-1], tokens[:, 1:], group, starts_over=segment == 0)


def check_lengths(tokens: dict[str, int], batch_size: int, segment_length: int) -> None:
    """Refuse texts that are too short to train on and to score, before anything is built for them.

    Args:
        tokens: of each split.
        batch_size: B.
        segment_length: T.

    Raises:
        InputError: the training text has too few tokens for B streams of T, or another split fewer than two.
    """
    _check_stream(tokens["train"], batch_size, segment_length)
    for split in ("valid", "test"):
        if tokens[split] < 2:
            raise InputError(
                f"the {split} text has {tokens[split]} token: it needs two, as the first is not scored"
            )


def _check_stream(tokens: int, batch_size: int, segment_length: int) -> None:
    needed = batch_size * segment_length + 1
    if tokens < needed:
        raise InputError(
            f"the training text has {tokens} tokens, too few for schedule.batch_size={batch_size} "
            f"streams of schedule.segment_length={segment_length}; they take {needed}: lower one of them"
        )


class EvaluationRow(NamedTuple):
    """One contiguous part of a text, by position of its targets."""

    first: int  # first target read; those before `scored` only fill the memory
    scored: int  # first target scored
    end: int  # after the last target


def evaluation_rows(tokens: int, rows: int, warm_up: int) -> list[EvaluationRow]:
    """Deal the targets 1..N-1 out to at most `rows` contiguous ranges of nearly equal length.

    Args:
        tokens: N.
        rows: R; fewer where there are fewer targets.
        warm_up: inputs before each range, clipped at the text's start. With layers * M of them a score does
            not depend on R.

    Raises:
        InputError: the text has no token after its first.
    """
    if tokens < 2:
        raise InputError(f"the text to score has {tokens} token: it needs two, as the first is not scored")
    rows = min(rows, tokens - 1)
    bounds = [1 + row * (tokens - 1) // rows for row in range(rows + 1)]
    return [EvaluationRow(max(1, scored - warm_up), scored, end) for scored, end in pairwise(bounds)]


class EvaluationStream:
    """A text in R rows side by side; over all processes every token after the first is scored once.

    Rows that end early are filled up with input 0 and target NOT_SCORED; the last segment is as long as the
    longest row needs. A process without rows yields nothing.

    Args:
        ids: (N,) the text.
        rows: R, over all processes.
        segment_length: T.
        warm_up: see `evaluation_rows`.
        rank: index of this process.
        world_size: number of processes.

    Raises:
        InputError: the text has no token after its first.
    """

    def __init__(
        self, ids: Ids, rows: int, segment_length: int, warm_up: int, rank: int = 0, world_size: int = 1
    ) -> None:
        every = evaluation_rows(len(ids), rows, warm_up)
        begin, end = (r * len(every) // world_size for r in (rank, rank + 1))
        self.rows = every[begin:end]
        self.ids = ids
        self.segment_length = segment_length
        self.length = max((row.end - row.first for row in self.rows), default=0)  # of the longest row

    def __len__(self) -> int:
        return -(-self.length // self.segment_length)

    @property
    def scored(self) -> int:
        """Tokens that this process scores."""
        return sum(row.end - row.scored for row in self.rows)

    def __iter__(self) -> Iterator[Segment]:
        for begin in range(0, self.length, self.segment_length):
            width = min(self.segment_length, self.length - begin)
            yield _row_segment(self.ids, self.rows, begin, width)


class WindowStream:
    """A text in windows, each read with an empty memory; over all processes every token is scored once.

    A window scores `stride` targets after `context` tokens (fewer at the text's start), so every scored
    token has at least `context` tokens before it in its window and fewer than context + stride.

    Args:
        ids: (N,) the text.
        rows: windows per forward pass.
        context: tokens read before the scored ones.
        stride: tokens that a window scores.
        rank: index of this process.
        world_size: number of processes.

    Raises:
        InputError: the text has no token after its first.
    """

    def __init__(
        self, ids: Ids, rows: int, context: int, stride: int, rank: int = 0, world_size: int = 1
    ) -> None:
        every = evaluation_rows(len(ids), -(-(len(ids) - 1) // stride), context)
        begin, end = (r * len(every) // world_size for r in (rank, rank + 1))
        self.windows = every[begin:end]
        self.ids = ids
        self.rows = rows

    def __len__(self) -> int:
        return -(-len(self.windows) // self.rows)

    @property
    def scored(self) -> int:
        """Tokens that this process scores."""
        return sum(row.end - row.scored for row in self.windows)

    def __iter__(self) -> Iterator[Segment]:
        for index in range(len(self)):
            batch = self.windows[index * self.rows : (index + 1) * self.rows]
            yield _row_segment(self.ids, batch, 0, max(row.end - row.first for row in batch))


def _row_segment(ids: Ids, rows: list[EvaluationRow], begin: int, width: int) -> Segment:
    """The part of each row that begins `begin` tokens into it, (rows, width)."""
    inputs = np.zeros((len(rows), width), np.int64)
    targets = np.full((len(rows), width), NOT_SCORED, np.int64)
    for i, row in enumerate(rows):
        first = row.first + begin
        end = max(first, min(first + width, row.end))
        inputs[i, : end - first] = ids[first - 1 : end - 1]
        scored = min(max(first, row.scored), end)
        targets[i, scored - first : end - first] = ids[scored:end]
    places = torch.tensor([row.first + begin for row in rows])
    return Segment(torch.from_numpy(inputs), torch.from_numpy(targets), 0, begin == 0, places)
