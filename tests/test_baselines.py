"""The comparison models of the README, worked by hand on a few words."""

import math

from baselines import bigram_perplexity, known, unigram_perplexity

TRAIN = ["a", "b", "a", "<eos>"]


def test_unigram_by_hand() -> None:
    # 3 known words and <unk>: 4 + 0.5 * 4 = 6; scored: b (1.5 / 6), <eos> (1.5 / 6)
    assert math.isclose(unigram_perplexity(TRAIN, ["a", "b", "<eos>"], 0.5, 4), 4.0)


def test_bigram_by_hand() -> None:
    # a is followed twice, once by b: (1 + 1) / (2 + 4); b once, by a: b -> <eos> is 1 / (1 + 4)
    expected = ((2 / 6) * (1 / 5)) ** -0.5
    assert math.isclose(bigram_perplexity(TRAIN, ["a", "b", "<eos>"], 1.0, 4), expected)


def test_unknown_words() -> None:
    assert known(["a", "z"], {"a", "<unk>"}) == ["a", "<unk>"]
