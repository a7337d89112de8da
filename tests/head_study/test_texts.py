"""Every token of a text is read in its place and scored once."""

import numpy as np
import pytest

from allattn.data.segments import NOT_SCORED
from allattn.errors import InputError
from allattn.head_study.texts import Text, first_tokens, in_windows, refuse_same, with_memory
from allattn.heads.watched import Batch

IDS = np.arange(100, 124, dtype=np.int32)  # 23 tokens to score


@pytest.mark.parametrize(
    "text", [with_memory(IDS, 2, 5, warm_up=4), in_windows(IDS, 2, 5)], ids=["memory", "windows"]
)
def test_what_is_real_and_what_is_scored(text: Text) -> None:
    scored: list[int] = []
    for batch in text.batches():
        targets = batch.targets[batch.targets >= 0]
        scored += targets.tolist()
        assert bool((batch.real | (batch.targets < 0)).all())
        assert bool((batch.ids[batch.real] >= 100).all())
        assert bool((batch.ids[~batch.real] == 0).all())
    assert sorted(scored) == IDS[1:].tolist()
    assert text.tokens == 23


def test_windows_lie_one_after_the_other() -> None:
    """23 tokens in five windows of nearly equal length, each read from its own start."""
    batches: list[Batch] = list(in_windows(IDS, 2, 5).batches())
    assert [batch.real.sum(dim=1).tolist() for batch in batches] == [[4, 5], [4, 5], [5]]
    assert batches[1].ids[0].tolist() == [109, 110, 111, 112, 0]
    assert batches[1].targets[0].tolist() == [110, 111, 112, 113, NOT_SCORED]


def test_calibration_and_test_are_two_texts() -> None:
    other = IDS.copy()
    other[3] = 0
    refuse_same(IDS, other)
    with pytest.raises(InputError, match=r"calibration\.same=true"):
        refuse_same(first_tokens(IDS, "calibration", 10, 5), IDS)
    assert in_windows(IDS, 2, 5).fingerprint != in_windows(other, 2, 5).fingerprint


@pytest.mark.parametrize(("tokens", "length", "said"), [(24, 5, "tokens=24"), (None, 24, "length=24")])
def test_a_text_that_is_too_short(tokens: int | None, length: int, said: str) -> None:
    with pytest.raises(InputError, match=f"test.*{said}"):
        first_tokens(IDS, "test", tokens, length)
