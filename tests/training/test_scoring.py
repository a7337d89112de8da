import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from allattn.data.segments import NOT_SCORED, EvaluationStream, Segment
from allattn.model.language_model import AllAttentionLM
from allattn.training import scoring
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.scoring import Score, score, score_split

Models = Callable[..., AllAttentionLM]
IDS = np.random.default_rng(0).integers(0, 50, 97).astype(np.int32)


class FixedLosses(nn.Module):
    """Gives every scored target of the n-th segment the n-th loss."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.positions = nn.Module()
        self.positions.table = torch.zeros(1)
        self.losses = iter(losses)

    def empty_memory(self, rows: int) -> list[Tensor]:
        return []

    def forward(self, ids: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor]]:
        return torch.where(targets >= 0, next(self.losses), 0.0), []


def segments(*counts: int) -> Iterator[Segment]:
    """Segments of (1, 4) with the given numbers of scored targets."""
    for index, count in enumerate(counts):
        targets = torch.tensor([[1] * count + [NOT_SCORED] * (4 - count)])
        yield Segment(torch.zeros(1, 4, dtype=torch.long), targets, 0, index == 0)


def corpus(ids: np.ndarray[Any, Any], words: int) -> Any:
    """What scoring reads of a corpus."""
    return SimpleNamespace(splits={"valid": SimpleNamespace(ids=ids, words=words)})


def test_perplexity_is_exp_of_nats_over_tokens() -> None:
    """Means 2, 3, 8 over 4, 4, 2 targets: 36.598; not 76.198 (mean of means), not 1002.8."""
    model: Any = FixedLosses([2.0, 3.0, 8.0])
    result = score(model, segments(4, 4, 2))
    assert result == Score(36.0, 10)
    assert result.perplexity == pytest.approx(36.598, abs=1e-3)
    assert result.bits == pytest.approx(3.6 / math.log(2))


def test_perplexity_per_word_divides_by_words() -> None:
    assert Score(36.0, 10, 6).word_perplexity == pytest.approx(math.exp(6))
    assert Score(36.0, 10).word_perplexity == pytest.approx(math.exp(3.6))


def test_huge_losses_give_infinity() -> None:
    assert Score(8000.0, 10).perplexity == math.inf
    assert Score(8000.0, 10).word_perplexity == math.inf


@pytest.mark.parametrize("training", [False, True])
def test_the_models_mode_is_left_as_it_was(random_model: Models, training: bool) -> None:
    model = random_model(attention_dropout=0.5, input_dropout=0.5).train(training)
    results = [score(model, EvaluationStream(IDS, 2, 8, 21)) for _ in range(2)]
    assert results[0] == results[1], "no dropout in evaluation"
    assert model.training is training


def whole_text_loss(model: AllAttentionLM, window: int) -> float:
    """Sum of -log p of every token after the first, in one pass over the whole text."""
    ids = torch.from_numpy(IDS.astype(np.int64)).unsqueeze(0)
    hidden, _ = model.hidden(ids[:, :-1], model.empty_memory(1), memory_length=window)
    log_probs = model.softmax.log_probs(hidden, model.embedding)
    return -float(log_probs.gather(2, ids[:, 1:, None]).sum())


@pytest.mark.parametrize("memory_length", [None, 3, 11])
@pytest.mark.parametrize(("rows", "segment_length"), [(1, 96), (1, 5), (3, 7), (8, 4), (96, 1)])
def test_perplexity_does_not_depend_on_rows_and_segments(
    random_model: Models, rows: int, segment_length: int, memory_length: int | None
) -> None:
    model = random_model(torch.float64)
    settings = EvaluationConfig(rows=rows, segment_length=segment_length, memory_length=memory_length)
    result = score_split(model, corpus(IDS, len(IDS)), "valid", settings)
    with torch.no_grad():
        expected = whole_text_loss(model, memory_length or 7)
    assert result.tokens == result.words == len(IDS) - 1
    assert result.nats == pytest.approx(expected, rel=1e-9, abs=0)


def test_memory_matters_for_the_score(random_model: Models) -> None:
    """Otherwise the test above could not fail."""
    model = random_model(torch.float64)
    nats = [score(model, EvaluationStream(IDS, 8, 4, warm_up)).nats for warm_up in (0, 21)]
    assert abs(nats[0] - nats[1]) > 1e-3


def test_multipliers_are_used(random_model: Models) -> None:
    model = random_model(torch.float64)
    ones = [torch.ones(8, dtype=torch.float64)] * 3
    stream = EvaluationStream(IDS, 2, 8, 21)
    assert score(model, stream, ones) == score(model, stream)
    assert score(model, stream, [0 * one for one in ones]) != score(model, stream)


@pytest.mark.parametrize("mode", EvaluationMode, ids=str)
@pytest.mark.parametrize(("rows", "world_size"), [(3, 2), (1, 2), (5, 3)])
def test_processes_with_unequal_shares_add_up(
    random_model: Models,
    monkeypatch: pytest.MonkeyPatch,
    mode: EvaluationMode,
    rows: int,
    world_size: int,
) -> None:
    model = random_model(torch.float64)
    text = corpus(IDS, 60)
    settings = EvaluationConfig(rows=rows, segment_length=5, mode=mode, context=9, stride=20)
    alone = score_split(model, text, "valid", settings)

    def share(rank: int, all_reduce: Callable[[Tensor], None]) -> Score:
        monkeypatch.setattr(scoring.dist, "all_reduce", all_reduce)
        return score_split(model, text, "valid", settings, None, rank, world_size)

    others = [share(rank, lambda total: None) for rank in range(1, world_size)]

    def add_others(total: Tensor) -> None:
        total += sum(other.nats if total.is_floating_point() else other.tokens for other in others)

    together = share(0, add_others)
    own = together.tokens - sum(other.tokens for other in others)
    assert len({own, *(other.tokens for other in others)}) > 1, "the shares are unequal"
    assert together.tokens == alone.tokens == 96
    assert together.words == alone.words == 59
    assert together.nats == pytest.approx(alone.nats, rel=1e-12)


def test_windows_read_their_context_afresh(random_model: Models) -> None:
    """Window mode against one call per window."""
    model = random_model(torch.float64)
    settings = EvaluationConfig(rows=4, mode=EvaluationMode.window, context=9, stride=8)
    result = score_split(model, corpus(IDS, len(IDS)), "valid", settings)
    ids, expected = torch.from_numpy(IDS.astype(np.int64)), 0.0
    for first in range(1, 97, 8):
        begin = max(0, first - 9 - 1)
        piece = ids[begin : first + 8].unsqueeze(0)
        with torch.no_grad():
            nats, _ = model(piece[:, :-1], piece[:, 1:], model.empty_memory(1))
        expected += float(nats[0, -8:].sum())
    assert result.tokens == 96
    assert result.nats == pytest.approx(expected, rel=1e-12)
