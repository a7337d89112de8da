import numpy as np
import pytest
import torch

from allattn.data.segments import SegmentStream
from allattn.training.segment_memory import by_stream, of_process

LAYOUTS = [(1, 1), (1, 4), (2, 2), (4, 1), (2, 1), (1, 2)]  # processes, accumulation groups


@pytest.mark.parametrize(("processes", "groups"), LAYOUTS)
def test_memory_follows_its_stream(processes: int, groups: int) -> None:
    """Each process remembers the tokens that it reads; put together they are those of streams 0, 1, 2, 3."""
    parts = []
    for rank in range(processes):
        stream = SegmentStream(np.arange(101, dtype=np.int32), 4, 5, groups, 0, groups, rank, processes)
        parts.append({piece.group: [piece.inputs[..., None]] for piece in stream})  # (b, 5, 1)
    (together,) = by_stream(parts)
    assert together.squeeze(-1).tolist() == [list(range(first, first + 5)) for first in (0, 25, 50, 75)]
    for rank, expected in enumerate(parts):
        mine = of_process([together], groups, rank, processes)
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[group][0], expected[group][0]) for group in expected)


def test_nothing_read_is_no_memory() -> None:
    assert by_stream([{}, {}]) == []
    assert of_process([], 2, 0, 1) == {}
