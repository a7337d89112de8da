"""Temperature, top-k and top-p against cases worked by hand and a plain-Python account; then the draws."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from allattn.errors import InputError
from allattn.model.sampling import candidates, check_sampling, sampler
from allattn.randomness import generator


def logs(*probabilities: float) -> Tensor:
    """Their logarithms, float64."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def chosen(log_probs: Tensor, temperature: float = 1, top_k: int = 0, top_p: float = 1) -> dict[int, float]:
    """`candidates` as word -> probability."""
    words, probabilities = candidates(log_probs, temperature, top_k, top_p)
    return dict(zip(words.tolist(), probabilities.tolist(), strict=True))


FOUR = (0.125, 0.5, 0.125, 0.25)
THIRD = 1 / 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.125, 1: 0.5, 2: 0.125, 3: 0.25}),
        ({"top_k": 1}, {1: 1}),
        ({"top_k": 2}, {1: 2 * THIRD, 3: THIRD}),
        ({"top_k": 3}, {1: 4 / 7, 3: 2 / 7, 0: 1 / 7}),  # words 0 and 2 tie: the smaller id stays
        ({"top_k": 4}, {0: 0.125, 1: 0.5, 2: 0.125, 3: 0.25}),
        ({"top_k": 99}, {0: 0.125, 1: 0.5, 2: 0.125, 3: 0.25}),  # more than there are
        ({"top_p": 1e-300}, {1: 1}),  # one word at least
        ({"top_p": 0.5}, {1: 1}),  # reaches it exactly
        ({"top_p": 0.51}, {1: 2 * THIRD, 3: THIRD}),
        ({"top_p": 0.75}, {1: 2 * THIRD, 3: THIRD}),
        ({"top_p": 0.76}, {1: 4 / 7, 3: 2 / 7, 0: 1 / 7}),  # the tie again
        ({"top_p": 0.9}, {0: 0.125, 1: 0.5, 2: 0.125, 3: 0.25}),
        ({"top_k": 2, "top_p": 0.6}, {1: 1}),  # 2/3 of what top-k left; 0.5 of all would not reach 0.6
        ({"top_k": 2, "top_p": 0.7}, {1: 2 * THIRD, 3: THIRD}),
        ({"temperature": 0.5}, {0: 1 / 22, 1: 16 / 22, 2: 1 / 22, 3: 4 / 22}),  # squares
        ({"temperature": 0.5, "top_p": 0.7}, {1: 1}),  # the temperature comes first
        ({"temperature": 1e-320}, {0: 0, 1: 1, 2: 0, 3: 0}),
    ],
)
def test_cases_worked_by_hand(settings: dict[str, float], expected: dict[int, float]) -> None:
    assert chosen(logs(*FOUR), **settings) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


def test_temperature_two_takes_square_roots() -> None:
    assert chosen(logs(0.64, 0.36), temperature=2) == pytest.approx({0: 4 / 7, 1: 3 / 7})


def test_equal_words_are_taken_in_order_of_their_ids() -> None:
    equal = torch.zeros(1000)
    assert list(chosen(equal, top_k=3)) == [0, 1, 2]
    assert list(chosen(equal, top_p=0.0035)) == [0, 1, 2, 3]
    assert list(chosen(equal, top_p=1e-12)) == [0]


def test_float32_logits_of_any_level_and_impossible_words() -> None:
    """Log-probabilities need not sum to 1, and a word may have none."""
    shifted = torch.tensor([-math.inf, 900.0, 900.0 + math.log(3), -math.inf])
    expected = pytest.approx({1: 0.25, 2: 0.75}, rel=1e-4)
    assert chosen(shifted, top_k=2) == expected
    assert chosen(shifted, top_p=0.99) == expected
    assert chosen(shifted) == pytest.approx({0: 0, 1: 0.25, 2: 0.75, 3: 0}, rel=1e-4)


@given(
    st.lists(st.integers(-12, 0), min_size=1, max_size=30),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 35),
    st.floats(0.001, 1),
)
def test_the_words_are_those_of_a_plain_account(
    scores: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    """Sort, count off k, add up until p is reached; whole scores make many ties."""
    weights = {word: math.exp(score / 2 / temperature) for word, score in enumerate(scores)}
    order = sorted(weights, key=lambda word: -scores[word])[: top_k or None]
    total, reached, expected, near = sum(weights[word] for word in order), 0.0, [], False
    for word in order:
        if top_p == 1 or reached / total < top_p:
            expected.append(word)
        reached += weights[word]
        near |= abs(reached / total - top_p) < 1e-9 and top_p < 1
    if near:  # rounding decides
        return
    found = chosen(torch.tensor(scores, dtype=torch.float64) / 2, temperature, top_k, top_p)
    assert set(found) == set(expected)
    kept = sum(weights[word] for word in expected)
    assert found == pytest.approx({word: weights[word] / kept for word in expected}, rel=1e-9, abs=1e-300)


# --- draws


def test_draws_follow_the_probabilities() -> None:
    choose = sampler(1.0, 0, 1.0, generator(0, "test"))
    log_probs = logs(0.1, 0.0, 0.6, 0.3)
    counts = Counter(choose(log_probs) for _ in range(10_000))
    assert counts[1] == 0
    for word, share in ((0, 0.1), (2, 0.6), (3, 0.3)):
        assert counts[word] / 10_000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 10_000))


def test_draws_stay_among_the_candidates() -> None:
    choose = sampler(1.0, 3, 0.9, generator(0, "test"))
    assert {choose(logs(*FOUR)) for _ in range(300)} == {0, 1, 3}


def test_equal_seeds_draw_equal_words() -> None:
    log_probs = torch.zeros(100)
    one, two, other = (sampler(1.0, 0, 1.0, generator(seed, "test")) for seed in (5, 5, 6))
    first = [one(log_probs) for _ in range(50)]
    assert [two(log_probs) for _ in range(50)] == first
    assert [other(log_probs) for _ in range(50)] != first


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    choose = sampler(0.0, 0, 1.0, generator(0, "test"))
    assert [choose(logs(0.2, 0.4, 0.4)) for _ in range(20)] == [1] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_without_numbers_is_refused(temperature: float) -> None:
    choose = sampler(temperature, 0, 1.0, generator(0, "test"))
    with pytest.raises(InputError, match="NaN"):
        choose(torch.tensor([0.0, math.nan, 1.0]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ((-0.1, 0, 1.0), "temperature=-0.1"),
        ((math.nan, 0, 1.0), "temperature=nan"),
        ((math.inf, 0, 1.0), "temperature=inf"),
        ((1.0, -1, 1.0), "top_k=-1"),
        ((1.0, 0, 0.0), "top_p=0.0"),
        ((1.0, 0, 1.01), r"top_p=1\.01"),
        ((1.0, 0, math.nan), "top_p=nan"),
    ],
)
def test_settings_that_choose_no_word_are_refused(settings: tuple[float, int, float], named: str) -> None:
    for refuse in (lambda: check_sampling(*settings), lambda: sampler(*settings, generator(0, "test"))):
        with pytest.raises(InputError, match=named):
            refuse()


def test_the_limits_are_accepted() -> None:
    check_sampling(0.0, 0, 1.0)
    check_sampling(5.0, 10**9, 1e-9)
