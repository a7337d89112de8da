import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from allattn.data.segments import NOT_SCORED, EvaluationStream, Segment
from allattn.model.language_model import AllAttentionLM
from allattn.training import scoring
from allattn.training.config import EvaluationConfig, EvaluationMode
from allattn.training.scoring import Score, score, score_split

Models = Callable[..., AllAttentionLM]
EPS = np.finfo(np.float64).eps
IDS = np.random.default_rng(0).integers(0, 50, 97).astype(np.int32)


class FixedLosses(nn.Module):
    """Gives every scored target of the n-th segment the n-th loss."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.device = torch.device("cpu")
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


def corpus(
    ids: np.ndarray[Any, Any], words: int, articles: Sequence[int] = (), unseen: Sequence[int] = ()
) -> Any:
    """What scoring reads of a corpus."""
    split = SimpleNamespace(ids=ids, words=words, articles=np.array(articles), unseen=np.array(unseen))
    return SimpleNamespace(splits={"valid": split})


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
    text = corpus(IDS, 60, [2, 30, 31, 70], [0, 5, 30, 40, 96])
    settings = EvaluationConfig(rows=rows, segment_length=5, mode=mode, context=9, stride=20)
    alone = score_split(model, text, "valid", settings)

    def share(rank: int, all_reduce: Callable[[Tensor], None]) -> Score:
        monkeypatch.setattr(scoring.dist, "all_reduce", all_reduce)
        return score_split(model, text, "valid", settings, None, rank, world_size)

    others = [share(rank, lambda total: None) for rank in range(1, world_size)]

    def add_others(total: Tensor) -> None:
        for other in others:
            if total.is_floating_point():
                total += torch.tensor([other.nats, other.unseen_nats, *other.articles.nats])
            else:
                total += torch.tensor([other.tokens, other.unseen_tokens, *other.articles.tokens])

    together = share(0, add_others)
    own = together.tokens - sum(other.tokens for other in others)
    assert len({own, *(other.tokens for other in others)}) > 1, "the shares are unequal"
    assert together.tokens == alone.tokens == 96
    assert together.words == alone.words == 59
    assert together.nats == pytest.approx(alone.nats, rel=1e-12)
    assert together.unseen_tokens == alone.unseen_tokens == 4
    assert together.unseen_nats == pytest.approx(alone.unseen_nats, rel=1e-12)
    assert together.articles.tokens.tolist() == alone.articles.tokens.tolist() == [29, 1, 39, 27]
    np.testing.assert_allclose(together.articles.nats, alone.articles.nats, rtol=1e-12)


def losses_by_place(model: AllAttentionLM) -> npt.NDArray[np.float64]:
    """(97,) -log p of every token of IDS in one pass; 0 for the first."""
    ids = torch.from_numpy(IDS.astype(np.int64)).unsqueeze(0)
    with torch.no_grad():
        nats, _ = model(ids[:, :-1], ids[:, 1:], model.empty_memory(1))
    return np.concatenate([[0.0], nats[0].numpy()])


@pytest.mark.parametrize("mode", EvaluationMode, ids=str)
def test_nats_by_article_and_of_unseen_words(random_model: Models, mode: EvaluationMode) -> None:
    """Against a loop over the text's tokens; the first token is not scored, though it is an unseen word."""
    model, bounds, unseen = random_model(torch.float64), [2, 30, 31, 70], [0, 5, 30, 40, 96]
    settings = EvaluationConfig(rows=3, segment_length=5, mode=mode, context=96, stride=20)
    result = score_split(model, corpus(IDS, len(IDS), bounds, unseen), "valid", settings)
    losses = losses_by_place(model)
    assert result.articles.unit == "articles"
    expected = [losses[begin:end].sum() for begin, end in pairwise([0, *bounds[1:], len(IDS)])]
    np.testing.assert_allclose(result.articles.nats, expected, rtol=1e-9)
    assert result.unseen_nats == pytest.approx(losses[unseen].sum(), rel=1e-9)
    assert result.articles.tokens.tolist() == [29, 1, 39, 27]
    assert result.articles.nats.sum() == pytest.approx(result.nats, rel=96 * EPS, abs=0)
    assert result.unseen_tokens == 4
    assert result.seen == Score(result.nats - result.unseen_nats, 92)


def test_a_text_without_titles_is_scored_by_blocks_of_a_thousand_tokens(random_model: Models) -> None:
    ids = np.resize(IDS, 2_500)
    settings = EvaluationConfig(rows=7, segment_length=20)
    result = score_split(random_model(torch.float64), corpus(ids, len(ids)), "valid", settings)
    assert result.articles.unit == "blocks of 1,000 tokens"
    assert result.articles.tokens.tolist() == [999, 1000, 500]
    assert result.articles.nats.sum() == pytest.approx(result.nats, rel=2_500 * EPS, abs=0)


def test_nothing_is_left_where_every_word_is_unseen() -> None:
    assert Score(4.0, 2, None, 4.0, 2).seen is None


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
