from itertools import pairwise

import numpy as np
import pytest
import torch

from allattn.data.segments import Segment, SegmentStream
from allattn.errors import InputError

IDS = np.arange(800, dtype=np.int32)
PER_EPOCH = 19  # (800 - 1) // 4 = 199 inputs a stream, 19 segments of 10


def stream(total: int = PER_EPOCH, **settings: int) -> SegmentStream:
    return SegmentStream(IDS, **{"batch_size": 4, "segment_length": 10, "total": total, **settings})


def same(left: Segment, right: Segment) -> bool:
    return (
        torch.equal(left.inputs, right.inputs)
        and torch.equal(left.targets, right.targets)
        and left[2:] == right[2:]
    )


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_rows_go_on_and_no_value_comes_twice(world_size: int, accumulation: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        micro_batches = list(
            stream(PER_EPOCH * accumulation, rank=rank, world_size=world_size, accumulation=accumulation)
        )
        assert len(micro_batches) == PER_EPOCH * accumulation
        for group in range(accumulation):
            pieces = micro_batches[group::accumulation]
            assert [piece.group for piece in pieces] == [group] * PER_EPOCH
            assert [piece.starts_over for piece in pieces] == [True] + [False] * (PER_EPOCH - 1)
            for piece in pieces:
                assert piece.inputs.shape == (4 // world_size // accumulation, 10)
                assert piece.inputs.dtype == piece.targets.dtype == torch.int64
                assert torch.equal(piece.targets, piece.inputs + 1)
                seen += piece.inputs.flatten().tolist()
            for before, after in pairwise(pieces):
                assert torch.equal(after.inputs[:, 0], before.inputs[:, -1] + 1)
    assert len(seen) == len(set(seen)) == 4 * PER_EPOCH * 10


def test_first_inputs_are_the_streams_beginnings() -> None:
    first = next(iter(stream()))
    assert first.inputs[:, 0].tolist() == [0, 199, 398, 597]


def test_a_step_reads_the_same_rows_however_it_is_shared_out() -> None:
    whole = [piece.inputs for piece in stream(5)]
    for world_size, accumulation in ((2, 1), (1, 2), (2, 2)):
        parts = [
            list(stream(5 * accumulation, rank=rank, world_size=world_size, accumulation=accumulation))
            for rank in range(world_size)
        ]
        for step, expected in enumerate(whole):
            pieces = [
                parts[rank][step * accumulation + group].inputs
                for group in range(accumulation)
                for rank in range(world_size)
            ]
            assert torch.equal(torch.cat(pieces), expected)


def test_memory_is_emptied_at_each_epoch_start() -> None:
    pieces = list(stream(3 * PER_EPOCH))
    assert [index for index, piece in enumerate(pieces) if piece.starts_over] == [0, PER_EPOCH, 2 * PER_EPOCH]
    assert same(pieces[PER_EPOCH + 3], pieces[3])


def test_resumes_where_it_stopped() -> None:
    whole = list(stream(45, accumulation=2, rank=1, world_size=2))
    for start in (0, 1, 7, 2 * PER_EPOCH, 44, 45):
        rest = stream(45, accumulation=2, rank=1, world_size=2, start=start)
        assert len(rest) == 45, "Lightning counts from the first micro-batch on"
        assert len(list(rest)) == 45 - start
        assert all(same(a, b) for a, b in zip(whole[start:], rest, strict=True)), start


def test_refuses_streams_that_cannot_be_shared_out() -> None:
    with pytest.raises(InputError, match=r"schedule\.batch_size=4.*trainer\.accumulation=3"):
        stream(accumulation=3)
    with pytest.raises(InputError, match=r"schedule\.batch_size=4.*8 processes"):
        stream(world_size=8)


def test_refuses_a_text_that_is_too_short() -> None:
    assert SegmentStream(IDS[:41], batch_size=4, segment_length=10, total=1).segments == 1
    with pytest.raises(InputError) as caught:
        SegmentStream(IDS[:40], batch_size=4, segment_length=10, total=1)
    for part in ("40 tokens", "schedule.batch_size=4", "schedule.segment_length=10", "41"):
        assert part in str(caught.value)
