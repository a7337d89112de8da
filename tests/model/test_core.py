"""The attention core against a loop, its masks, and what the position term touches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, reference_attend
from torch import Tensor

from allattn.model.cores.core import attend, shift, visible

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))


def random_operands(
    batch: int, queries: int, keys: int, heads: int, width: int, persistent: int
) -> dict[str, Tensor]:
    """Arguments of `attend` under their names."""
    shapes = {
        "q": (batch, queries, heads, width),
        "k": (batch, keys, heads, width),
        "v": (batch, keys, heads, width),
        "r": (keys, heads, width),
        "u": (heads, width),
        "w": (heads, width),
        "pk": (persistent, heads, width),
        "pv": (persistent, heads, width),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("device", ["cpu", GPU])
@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    memory=st.integers(0, 6),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    persistent=st.integers(0, 4),
    window=st.integers(0, 14),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_core_equals_loop(
    device: str,
    batch: int,
    queries: int,
    memory: int,
    heads: int,
    width: int,
    persistent: int,
    window: int,
    seed: int,
) -> None:
    """Any shape and window; a window that reaches the first key is the growing mask."""
    torch.manual_seed(seed)
    keys = memory + queries
    operands = random_operands(batch, queries, keys, heads, width, persistent)
    mask = None if window >= keys - 1 else window
    expected = reference_attend(**operands, window=mask)
    there = {name: operand.to(device) for name, operand in operands.items()}
    assert_close(attend(**there, window=window, dropout=0.0).cpu(), expected, 1e-10)


def test_large_scores_stay_finite() -> None:
    operands = random_operands(1, 3, 5, 2, 4, 2)
    operands["q"] *= 1e4
    assert attend(**operands, window=4, dropout=0.0).isfinite().all()


@pytest.mark.parametrize(
    ("window", "counts"),
    [pytest.param(8, [5, 6, 7, 8], id="growing"), pytest.param(4, [5, 5, 5, 5], id="equal-context")],
)
def test_visible_keys_of_four_queries_over_four_memory_slots(window: int, counts: list[int]) -> None:
    """C02: the counts, each query's own key included, and no key after it."""
    mask = visible(4, 8, window, torch.device("cpu"))
    assert mask.sum(1).tolist() == counts
    assert all(mask[row, row + 4] and not mask[row, row + 5 :].any() for row in range(4))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (4, 4), (3, 7)])
def test_shift_puts_every_distance_under_its_key(queries: int, keys: int) -> None:
    """C03: entry (query, key) becomes the product of their distance, the memory counted in."""
    distances = torch.arange(keys - 1, -1, -1).expand(2, queries, keys)
    shifted = shift(distances.contiguous())
    for query in range(queries):
        own = keys - queries + query
        for key in range(own + 1):
            assert shifted[:, query, key].tolist() == [own - key] * 2


@pytest.mark.parametrize("name", ["r", "u", "w", "k"])
def test_persistent_scores_have_no_position_term_and_no_bias(name: str) -> None:
    """Ratios of persistent probabilities are exp(q.(PK_m - PK_n) / sqrt(c)) whatever r, u, v and k are."""
    width = 4
    operands = random_operands(2, 3, 5, 1, width, width)
    operands["v"].zero_()
    operands["pv"] = torch.eye(width, dtype=torch.float64).unsqueeze(1)  # output entry n = probability of n
    before = attend(**operands, window=4, dropout=0.0)
    operands[name] = torch.randn_like(operands[name])
    after = attend(**operands, window=4, dropout=0.0)
    assert (before - after).abs().max() > 1e-3  # the sequence's share did change
    scores = torch.einsum("bthc,nhc->bthn", operands["q"], operands["pk"]) / width**0.5
    for probabilities in (before, after):
        ratios = probabilities / probabilities.sum(-1, keepdim=True)
        assert_close(ratios, scores.softmax(-1), 1e-12)
