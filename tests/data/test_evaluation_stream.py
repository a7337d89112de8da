import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allattn.data.segments import NOT_SCORED, EvaluationStream, evaluation_rows
from allattn.errors import InputError


def joined(stream: EvaluationStream) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and targets of a stream, each (R, length)."""
    segments = list(stream)
    assert len(segments) == len(stream)
    assert [segment.starts_over for segment in segments] == [True] + [False] * (len(segments) - 1)
    assert all(segment.inputs.shape[1] == stream.segment_length for segment in segments[:-1])
    inputs = torch.cat([segment.inputs for segment in segments], dim=1)
    return inputs, torch.cat([segment.targets for segment in segments], dim=1)


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.integers(2, 120),
    rows=st.integers(1, 20),
    segment_length=st.integers(1, 30),
    warm_up=st.integers(0, 60),
    world_size=st.integers(1, 6),
)
def test_each_token_after_the_first_is_scored_once(
    tokens: int, rows: int, segment_length: int, warm_up: int, world_size: int
) -> None:
    ids = np.arange(1000, 1000 + tokens, dtype=np.int32)
    scored: list[int] = []
    for rank in range(world_size):
        stream = EvaluationStream(ids, rows, segment_length, warm_up, rank, world_size)
        before = len(scored)
        if len(stream):
            inputs, targets = joined(stream)
            for row in range(len(inputs)):
                wanted = targets[row] != NOT_SCORED
                positions = wanted.nonzero().flatten()
                first, last = int(positions[0]), int(positions[-1])
                assert len(positions) == last - first + 1  # one contiguous range
                assert torch.equal(inputs[row][wanted] + 1, targets[row][wanted])
                context = inputs[row, : last + 1]
                assert torch.equal(context, torch.arange(len(context)) + context[0])
                assert first == min(warm_up, int(targets[row, first]) - 1001)  # warm-up, clipped at the start
                assert not inputs[row, last + 1 :].any()  # padding
                scored += targets[row][wanted].tolist()
        assert len(scored) - before == stream.scored
    assert sorted(scored) == list(range(1001, 1000 + tokens))


def test_small_case_by_hand() -> None:
    stream = EvaluationStream(np.arange(8, dtype=np.int32), rows=3, segment_length=3, warm_up=1)
    inputs, targets = joined(stream)
    none = NOT_SCORED
    assert inputs.tolist() == [[0, 1, 0, 0], [1, 2, 3, 0], [3, 4, 5, 6]]
    assert targets.tolist() == [[1, 2, none, none], [none, 3, 4, none], [none, 5, 6, 7]]
    assert stream.scored == 7
    assert [segment.inputs.shape for segment in stream] == [(3, 3), (3, 1)]


def test_wikitext_like_length_loses_nothing() -> None:
    rows = evaluation_rows(245_569, 16, 16 * 192)
    assert sum(row.end - row.scored for row in rows) == 245_568
    assert {row.end - row.scored for row in rows} <= {15_348}
    assert rows[0].first == rows[0].scored == 1
    assert rows[1].scored - rows[1].first == 16 * 192


def test_a_process_without_rows_yields_nothing() -> None:
    streams = [EvaluationStream(np.arange(3, dtype=np.int32), 9, 4, 0, rank, 4) for rank in range(4)]
    assert [stream.scored for stream in streams] == [0, 1, 0, 1]
    assert list(streams[0]) == []


@pytest.mark.parametrize("tokens", [0, 1])
def test_refuses_a_text_with_nothing_to_score(tokens: int) -> None:
    with pytest.raises(InputError, match=f"{tokens} token"):
        EvaluationStream(np.zeros(tokens, np.int32), 1, 4, 0)
