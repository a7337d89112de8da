"""Every attention core against the loop, against one another in short dtypes, and what each must have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cores import ALL_CORES, CORES, LARGER, RECOMPUTE, SHAPES, error, loop, make, results
from support.fused_attention import attend_sdpa
from support.reference import assert_close, reference_attend
from torch import Tensor

from allattn.model.cores.choose import CORES as BY_NAME
from allattn.model.cores.choose import attend
from allattn.model.cores.inputs import CoreInputs, visible
from allattn.model.cores.plain import attend_plain, shift

pytestmark = pytest.mark.numeric

PLAIN_AND_RECOMPUTE = {name: CORES[name] for name in ("plain", "recompute")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("core", ALL_CORES)
def test_equals_the_loop_with_gradients(core: str, shape: str) -> None:
    """Each tensor on its own scale."""
    inputs = make(SHAPES[shape])
    found, wanted = (results(one, inputs) for one in (ALL_CORES[core], loop))
    for name in wanted:
        assert_close(found[name], wanted[name], 1e-10, name)


@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_own_attention_does_the_same(shape: str) -> None:
    """What the docs measure against the cores is the same function."""
    inputs = make(SHAPES[shape])
    with torch.no_grad():
        assert_close(attend_sdpa(inputs), loop(inputs), 1e-10)


@given(
    core=st.sampled_from(sorted(CORES)),
    batch=st.integers(1, 3),
    queries=st.integers(1, 6),
    memory=st.integers(0, 7),
    heads=st.integers(0, 3),
    width=st.integers(1, 4),
    persistent=st.integers(0, 4),
    window=st.integers(0, 14),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_shape_and_window_equals_the_loop(
    core: str,
    batch: int,
    queries: int,
    memory: int,
    heads: int,
    width: int,
    persistent: int,
    window: int,
    seed: int,
) -> None:
    inputs = make((batch, queries, memory, heads, width, persistent, window), seed=seed)
    with torch.no_grad():
        assert_close(CORES[core](inputs), loop(inputs), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES["partial memory"], SHAPES["window of 0"], LARGER], ids=str)
@pytest.mark.parametrize("core", CORES)
def test_rounds_no_worse_than_separate_steps(core: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The yardstick is torch's operations one by one; both round their own intermediate results.

    Where one is lucky the other need not be: three times its error, and a few roundings of a result.
    """
    inputs = make(shape, dtype, scales=(1.0, 1.0))
    bound = 3 * error(ALL_CORES["yardstick"], inputs) + 4 * torch.finfo(dtype).eps
    assert error(CORES[core], inputs) < bound


@pytest.mark.parametrize("core", ALL_CORES)
def test_dropout_changes_no_mean(core: str) -> None:
    inputs = make((1, 3, 2, 2, 4, 6, 2), dropout=0.3, scales=(1.0, 1.0))
    with torch.no_grad():
        draws = torch.stack([ALL_CORES[core](inputs) for _ in range(3000)])
        off = (draws.mean(0) - attend_plain(inputs._replace(dropout=0.0))) / (draws.std(0) / 3000**0.5)
    assert draws.std(0).min() > 0
    assert off.abs().max().item() < 5


@pytest.mark.parametrize("core", CORES)
def test_share_of_dropped_probabilities(core: str) -> None:
    """With values 1 and equal scores every output is the share kept, over what is kept on average."""
    B, T, h, N = 4, 16, 2, 500
    shape = (B, T, 0, h, 1, N, T)
    zeros = [torch.zeros_like(x) for x in make(shape).tensors]
    q, k, v, r, u, w, pk, pv = zeros
    z = CORES[core](CoreInputs(q, k, v + 1, r, u, w, pk, pv + 1, T, 0.2))
    seen = N + torch.arange(1, T + 1).view(1, T, 1, 1)
    keep = 1 - (51 / 256 if core in RECOMPUTE else 0.2)
    kept = z * keep * seen
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-6)  # whole numbers of probabilities
    total = float(seen.sum()) * B * h
    assert abs(float(kept.sum()) / total - keep) < 4 * (keep * (1 - keep) / total) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("core", PLAIN_AND_RECOMPUTE)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand(core: str, dtype: torch.dtype, sign: int) -> None:
    """The softmax becomes a choice of one key: its value, and no NaN in value or gradient."""
    noise = torch.Generator().manual_seed(0)
    q = torch.ones(1, 2, 1, 4, dtype=dtype)
    k = torch.zeros(1, 3, 1, 4, dtype=dtype)
    k[0, 1] = sign * 1e4  # a score of 2e4 for key 1, 0 for the others
    v = torch.randn(1, 3, 1, 4, generator=noise, dtype=torch.float64).to(dtype)
    r, u = torch.zeros(3, 1, 4, dtype=dtype), torch.zeros(1, 4, dtype=dtype)
    pk, pv = torch.zeros(1, 1, 4, dtype=dtype), torch.zeros(1, 1, 4, dtype=dtype)
    tensors = [x.requires_grad_() for x in (q, k, v, r, u, u.clone(), pk, pv)]
    z = CORES[core](CoreInputs._make((*tensors, 3, 0.0, 1.0, 1.0)))
    seen = [[1], [1]] if sign > 0 else [[0], [0, 2]]  # with the persistent one where key 1 is out
    for query, keys in enumerate(seen):
        weight = 1 / (len(keys) + (sign < 0))
        mean = v[0, keys, 0].double().sum(0) * weight
        rounding = 3 * torch.finfo(dtype).eps * v.abs().max().item()  # of a weight, its product and the sum
        torch.testing.assert_close(z[0, query, 0].double(), mean, rtol=0, atol=rounding)
    for gradient in torch.autograd.grad(z.sum(), tensors, allow_unused=True, materialize_grads=True):
        assert gradient.isfinite().all()


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
    inputs = make((2, 3, 2, 1, width, width, 4), scales=(1.0, 1.0))
    entries = torch.eye(width, dtype=torch.float64).unsqueeze(1)  # output entry n = probability of n
    inputs = inputs._replace(v=torch.zeros_like(inputs.v), pv=entries)
    other: Tensor = torch.randn_like(getattr(inputs, name))
    with torch.no_grad():
        before, after = attend(inputs), attend(inputs._replace(**{name: other}))
        scores = torch.einsum("bthc,nhc->bthn", inputs.q, inputs.pk) / width**0.5
    assert (before - after).abs().max() > 1e-3  # the sequence's share did change
    for probabilities in (before, after):
        ratios = probabilities / probabilities.sum(-1, keepdim=True)
        assert_close(ratios, scores.softmax(-1), 1e-12)


@pytest.mark.parametrize("core", RECOMPUTE)
def test_strided_inputs_and_inputs_unchanged(core: str) -> None:
    B, T, h, c = 2, 5, 2, 4
    qkv = torch.randn(B, T, 3 * h * c, dtype=torch.float64)
    q, k, v = (x.view(B, T, h, c) for x in qkv.chunk(3, -1))
    rest = make((B, T, 0, h, c, 3, T)).tensors[3:]
    copy = qkv.clone()
    z = CORES[core](CoreInputs(q, k, v, *rest, window=T, dropout=0.0))
    assert torch.equal(qkv, copy)
    assert_close(z, reference_attend(q, k, v, *rest, T), 1e-10)


@pytest.mark.parametrize("core", RECOMPUTE)
def test_autocast_with_float32_parameters(core: str) -> None:
    inputs = make((2, 6, 6, 2, 8, 10, 6), torch.float32)
    mixed = CoreInputs._make(x.bfloat16() if name in "qkvr" else x for name, x in inputs._asdict().items())
    with torch.autocast("cpu", torch.bfloat16):
        z = CORES[core](mixed)
        z.float().sum().backward()
    assert z.dtype == torch.bfloat16
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs.tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("core", ["plain", "recompute"])
def test_a_gpu_gives_the_cpus_results(core: str) -> None:
    """z and gradients in float64; in bfloat16 as near as the yardstick is on the same GPU."""
    for shape in (*SHAPES.values(), LARGER):
        assert error(BY_NAME[core], make(shape, device="cuda")) < 1e-10
    inputs = make(LARGER, torch.bfloat16, scales=(1.0, 1.0), device="cuda")
    bound = 3 * error(ALL_CORES["yardstick"], inputs) + 4 * torch.finfo(torch.bfloat16).eps
    assert error(BY_NAME[core], inputs) < bound
