"""The adaptive embedding: banded look-up, its scale, word dropout."""

import pytest
import torch
from support.reference import (
    assert_close,
    gradients,
    random_ids,
    randomised,
    reference_embedding,
    rounding,
    small_config,
)

from allattn.model.embedding import AdaptiveEmbedding

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("cutoffs", [[8, 18], [1], [29], []])
@pytest.mark.parametrize("shape", [(3, 20), (1, 1)])
def test_equals_a_look_up_per_token(cutoffs: list[int], shape: tuple[int, int]) -> None:
    """Values, and gradients of every table and projection."""
    config = small_config(cutoffs=cutoffs)
    embedding = randomised(AdaptiveEmbedding(config).double())
    ids = random_ids(*shape)
    actual, expected = embedding(ids), reference_embedding(embedding, ids, config)
    assert_close(actual, expected, 1e-12)
    weights, of = torch.randn_like(actual), list(embedding.parameters())
    found, wanted = (gradients((out * weights).sum(), of) for out in (actual, expected))
    for one, two in zip(found, wanted, strict=True):
        assert_close(one, two, 1e-12)


@pytest.mark.parametrize("words", [range(30), [7, 8, 17, 18, 29], [9, 9], [29, 0]])
def test_edges_of_bands_and_bands_without_words(words: list[int]) -> None:
    config = small_config()
    embedding = randomised(AdaptiveEmbedding(config).double())
    ids = torch.tensor([list(words)])
    assert_close(embedding(ids), reference_embedding(embedding, ids, config), 1e-12)


def test_scale_is_the_root_of_the_width() -> None:
    """A plain table: the row times sqrt(d), to the bit of the factor."""
    embedding = AdaptiveEmbedding(small_config(cutoffs=[], width=16)).double()
    ids = torch.arange(30)[None]
    assert torch.equal(embedding(ids)[0], embedding.tables[0] * 4)


def test_every_band_starts_at_unit_variance() -> None:
    embedding = AdaptiveEmbedding(small_config(vocabulary_size=3000, width=64, cutoffs=[1000, 2000], div=4))
    for start in (0, 1000, 2000):
        vectors = embedding(torch.arange(start, start + 1000)[None])
        assert vectors.std().item() == pytest.approx(1, rel=0.25)  # the last band has 4 dimensions only


def test_word_dropout_drops_whole_word_types() -> None:
    """All places of a word together, its whole vector; the others are scaled so that the mean stays."""
    p, draws = 0.25, 400
    config = small_config(word_dropout=p)
    embedding = randomised(AdaptiveEmbedding(config).double())
    ids = torch.arange(30).repeat(3).view(3, 30)  # every word once per row
    full = embedding.eval()(ids)
    embedding.train()
    dropped = torch.zeros(draws, 30)
    for draw in range(draws):
        out = embedding(ids)
        gone = (out == 0).all(-1)
        assert torch.equal(gone[0], gone[1])
        assert torch.equal(gone[0], gone[2])
        assert_close(out[~gone], full[~gone] / (1 - p), rounding(torch.float32, 2))  # the mask's dtype
        dropped[draw] = gone[0]
    spread = (p * (1 - p)) ** 0.5
    assert dropped.mean().item() == pytest.approx(p, abs=4 * spread / (draws * 30) ** 0.5)
    assert (dropped.mean(0) - p).abs().max() < 4.5 * spread / draws**0.5  # each word alone
    pairs = torch.corrcoef(dropped.t()).triu(diagonal=1)
    assert pairs.abs().max() < 5 / draws**0.5  # words are drawn independently


def test_evaluation_is_deterministic() -> None:
    config = small_config(word_dropout=0.5, input_dropout=0.5)
    embedding = randomised(AdaptiveEmbedding(config).double()).eval()
    ids = random_ids(2, 9)
    assert torch.equal(embedding(ids), embedding(ids))
    assert_close(embedding(ids), reference_embedding(embedding, ids, config), 1e-12)
