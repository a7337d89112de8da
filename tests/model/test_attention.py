"""One layer against the loop reference, and one layer worked out by hand."""

import math
from dataclasses import dataclass

import pytest
import torch
from support.reference import assert_close, gradients, randomised, reference_layer, small_config
from torch import Tensor
from torch.func import functional_call

from allattn.model.attention import AllAttention

pytestmark = pytest.mark.numeric

ALL = (0, 1, 2, 3)
FEED_FORWARD = ("norm.weight", "norm.bias", "inner.weight", "inner.bias", "outer.weight", "outer.bias")


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison; window None = the growing mask."""

    heads: tuple[int, ...] = ALL
    persistent: int = 3
    feed_forward: int = 0
    memory: int = 4
    queries: int = 5
    batch: int = 2
    window: int | None = 4
    multipliers: tuple[float, ...] | None = None
    scale: float = 1.0


CASES = {
    "full memory": Case(),
    "full memory, growing": Case(window=None),
    "memory longer than the window": Case(memory=6, window=3),
    "partial memory, two heads of four": Case(heads=(1, 3), persistent=2, memory=2, queries=4, batch=3),
    "no memory": Case(memory=0, queries=6, window=3, batch=3),
    "no memory, growing": Case(memory=0, queries=6, window=None),
    "window of 1": Case(window=1),
    "query sees itself only": Case(window=0),
    "no persistent vectors": Case(persistent=0),
    "no persistent vectors, growing, no memory": Case(persistent=0, memory=0, window=None),
    "one token": Case(heads=(2,), persistent=5, memory=3, queries=1, window=3),
    "one token, nothing before it": Case(memory=0, queries=1, batch=1),
    "one token, no persistent vector, nothing before it": Case(memory=0, queries=1, batch=1, persistent=0),
    "gates": Case(multipliers=(4 / 3, 0.0, 4 / 3, 4 / 3)),
    "gates of a cut layer": Case(heads=(0, 2, 3), multipliers=(0.0, 2.0, 2.0), window=None),
    "all gates closed": Case(heads=(1, 3), multipliers=(0.0, 0.0)),
    "constant scale": Case(heads=(0, 3), scale=2.0),
    "gates replace the constant scale": Case(heads=(0, 3), scale=2.0, multipliers=(4.0, 0.0)),
    "no heads": Case(heads=()),
    "no heads, gates": Case(heads=(), multipliers=()),
    "Transformer-XL": Case(persistent=0, feed_forward=7),
    "Transformer-XL, growing": Case(persistent=0, feed_forward=7, window=None, memory=2),
    "Transformer-XL, gates of a cut layer": Case(
        heads=(0, 2, 3), persistent=0, feed_forward=5, multipliers=(0.0, 2.0, 2.0)
    ),
    "Transformer-XL, constant scale": Case(heads=(0, 3), persistent=0, feed_forward=5, scale=2.0),
    "Transformer-XL, no heads": Case(heads=(), persistent=0, feed_forward=7),
    "persistent vectors and feed-forward": Case(feed_forward=7),
}


def build_layer(case: Case) -> AllAttention:
    kept = [list(case.heads), [0]]
    config = small_config(
        persistent_vectors=case.persistent,
        feed_forward=case.feed_forward,
        heads_kept=kept,
        output_scale=[case.scale, 1.0],
    )
    return randomised(AllAttention(config, 0).double())


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layer_equals_loop_reference(case: Case) -> None:
    """Output and the gradient of every parameter, of x, the memory, the positions and the multipliers."""
    layer = build_layer(case).requires_grad_()  # also what a layer without heads keeps from training
    keys = case.memory + case.queries
    inputs = {
        "x": leaf(case.batch, case.queries, 12),
        "memory": leaf(case.batch, case.memory, 12),
        "positions": leaf(keys, 12),
    }
    multipliers = None
    factors: list[float | Tensor] = [case.scale] * len(case.heads)
    if case.multipliers is not None:
        multipliers = torch.tensor(case.multipliers, dtype=torch.float64, requires_grad=True)
        inputs["multipliers"], factors = multipliers, list(multipliers)
    window = keys if case.window is None else case.window
    parameters = dict(layer.named_parameters())
    of = parameters | inputs

    actual = layer(inputs["x"], inputs["memory"], inputs["positions"], window, multipliers)
    expected = reference_layer(
        parameters, 3, inputs["x"], inputs["memory"], inputs["positions"], case.window, factors
    )
    assert_close(actual, expected, 1e-10)

    weights = torch.randn_like(expected)
    found, wanted = (gradients((out * weights).sum(), list(of.values())) for out in (actual, expected))
    for name, one, other in zip(of, found, wanted, strict=True):
        assert_close(one, other, 1e-10, name)


def test_every_input_matters() -> None:
    """The comparison above is not between gradients that are zero on both sides."""
    layer = build_layer(Case())
    x, memory, positions = leaf(2, 5, 12), leaf(2, 4, 12), leaf(9, 12)
    out = layer(x, memory, positions, 4)
    of = dict(layer.named_parameters()) | {"x": x, "memory": memory, "positions": positions}
    values = gradients((out * torch.randn_like(out)).sum(), list(of.values()))
    found = dict(zip(of, values, strict=True))
    seen = found.pop("positions").abs().sum(1) > 0
    for name, gradient in found.items():
        assert (gradient != 0).all(), name
    assert seen.tolist() == [True] * 5 + [False] * 4  # distances 0..4; the rest lies beyond the window


@pytest.mark.parametrize("persistent", [0, 2], ids=["Transformer-XL", "with persistent vectors"])
@pytest.mark.parametrize("heads", [(0, 2), ()], ids=["two heads", "no head"])
def test_gradients_equal_finite_differences(persistent: int, heads: tuple[int, ...]) -> None:
    """Of x, memory, positions, multipliers and every parameter, the feed-forward sublayer's too."""
    layer = build_layer(Case(heads, persistent, feed_forward=3)).requires_grad_()
    inputs = [leaf(1, 2, 12), leaf(1, 2, 12), leaf(4, 12), leaf(len(heads))]
    names, values = zip(*layer.named_parameters(), strict=True)

    def output(x: Tensor, memory: Tensor, positions: Tensor, gates: Tensor, *parameters: Tensor) -> Tensor:
        replaced = dict(zip(names, parameters, strict=True))
        out: Tensor = functional_call(layer, replaced, (x, memory, positions, 2, gates))
        return out

    assert torch.autograd.gradcheck(output, (*inputs, *values), fast_mode=True)


def test_closed_heads_get_no_gradient() -> None:
    layer = build_layer(Case())
    layer(leaf(2, 5, 12), leaf(2, 4, 12), leaf(9, 12), 4, torch.tensor([2.0, 0.0, 0.0, 2.0])).sum().backward()
    by_head = layer.query.weight.grad.view(4, -1).abs().sum(1) > 0
    assert by_head.tolist() == [True, False, False, True]


def test_without_heads_only_what_needs_none_trains() -> None:
    """The bias and the feed-forward sublayer (the comparison above: all other gradients are zero)."""
    layer = AllAttention(small_config(heads_kept=[[], [0]]), 0)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    layer = AllAttention(small_config(heads_kept=[[], [0]], feed_forward=5), 0)
    trained = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"bias", *(f"feed_forward.{name}" for name in FEED_FORWARD)}
    assert all(p.requires_grad for p in AllAttention(small_config(heads_kept=[[], [0]]), 1).parameters())


HAND_X = [[1.0, -1, 1, -1], [1, -1, -1, 1]]
HAND_MEMORY = [1.0, 1, -1, -1]
HAND_WINDOW_1 = [
    [2.5588235, -1.1882353, 2.5, -1.6588235],
    [4.5909091, -0.7342657, -5.0384615, -0.5524476],
]
HAND_GROWING = [HAND_WINDOW_1[0], [2.4473684, -0.2553606, -4.6851852, 1.5341131]]
HAND_GATED = [[3.6176471, -0.1764706, 0.5, -2.1176471], [7.6818182, -1.5454545, -1.5, -4.1818182]]


@pytest.mark.parametrize(
    ("window", "multipliers", "expected"),
    [
        pytest.param(1, None, HAND_WINDOW_1, id="equal-context"),
        pytest.param(2, None, HAND_GROWING, id="growing"),
        pytest.param(1, [2.0, 0.0], HAND_GATED, id="second head gated off"),
    ],
)
def test_layer_by_hand(window: int, multipliers: list[float] | None, expected: list[list[float]]) -> None:
    """H = 2, d_h = 2, N = 1, T = 2, one memory slot; every score is a whole multiple of ln 2.

    Inputs m = (1,1,-1,-1), x0 = (1,-1,1,-1), x1 = (1,-1,-1,1) have mean 0 and variance 1, and the norm's
    weight undoes its epsilon, so the normalised inputs are the inputs. With a = sqrt(2) ln 2:

             head 1                                   head 2
        q    a(x_1, x_2): x0 a(1,-1), x1 a(1,-1)      a(x_3, x_4): x0 a(1,-1), x1 a(-1,1)
        k    (x_2, x_3): m (1,-1), x0 (-1,1),         (x_4, x_1): m (-1,1), x0 (-1,1),
             x1 (-1,-1)                               x1 (1,1)
        v    (2 x_3, x_2): m (-2,1), x0 (2,-1),       (x_4, 3 x_2): m (-1,3), x0 (-1,-3),
             x1 (-2,-1)                               x1 (1,-3)
        r    (p_3, p_1): r0 (0,1), r1 (1,0), r2 (1,0) (p_2, p_4): r0 (0,1), r1 (1,0), r2 (0,-1)
        u, v a(0,1), a(-1,0)                          a(1,0), a(0,1)
        q+u  x0 a(1,0), x1 a(1,0)                     x0 a(2,-1), x1 a(0,1)
        q+v  x0 a(0,-1), x1 a(0,-1)                   x0 a(1,0), x1 a(-1,2)
        PK   (0,-1) after the factor sqrt(2)          (-1,1)
        PV   (4,0)                                    (0,1)

    Scores ((q+u).k + (q+v).r) / sqrt(2) and q.PK / sqrt(2) in units of ln 2, so the weights are powers of 2:

        x0, head 1: m  1+0 = 1,  x0 -1-1 = -2,             PK 1  -> 2, 1/4, 2        = (8, 1, 8) / 17
        x0, head 2: m -3+1 = -2, x0 -3+0 = -3,             PK -2 -> 1/4, 1/8, 1/4    = (2, 1, 2) / 5
        x1, head 1: m  1+0 = 1,  x0 -1+0 = -1, x1 -1-1=-2, PK 1  -> 2, 1/2, 1/4, 2   = (8, 2, 1, 8) / 19
            without m (equal context of 1)                                           = (2, 1, 8) / 11
        x1, head 2: m  1-2 = -1, x0  1-1 = 0,  x1 1+2 = 3, PK 2  -> 1/2, 1, 8, 4     = (1, 2, 16, 8) / 27
            without m                                                                = (1, 8, 4) / 13

    Means of the values:

        x0           head 1 (-16+2+32, 8-1) / 17     = (18, 7) / 17
                     head 2 (-2-1, 6-3+2) / 5        = (-3, 5) / 5
        x1           head 1 (4-2+32, -2-1) / 11      = (34, -3) / 11
                     head 2 (-1+8, -3-24+4) / 13     = (7, -23) / 13
        x1, growing  head 1 (-16+4-2+32, 8-2-1) / 19 = (18, 5) / 19
                     head 2 (-1-2+16, 3-6-48+8) / 27 = (13, -43) / 27

    With z = (head 1, head 2): WO z = (z_1, z_2 + z_3, 2 z_4, z_3 - z_1), bias (0.5, 0, -0.5, 1), plus x:

        x0           (18/17 + 1.5, -16/85 - 1, 2 + 0.5, -141/85)
        x1           (34/11 + 1.5, 38/143 - 1, -46/13 - 1.5, -365/143 + 2)
        x1, growing  (18/19 + 1.5, 382/513 - 1, -86/27 - 1.5, -239/513 + 2)
        gates 1, 0 with s_g = 2 / 1: WO z = (2 z_1, 2 z_2, 0, -2 z_1)
        x0 (36/17 + 1.5, 14/17 - 1, 0.5, -36/17), x1 (68/11 + 1.5, -6/11 - 1, -1.5, -68/11 + 2)
    """
    config = small_config(layers=1, width=4, heads=2, persistent_vectors=1, memory_length=1, cutoffs=[])
    layer = AllAttention(config, 0).double()
    a = 0.9802581434685472  # sqrt(2) ln 2
    half = 0.7071067811865476  # 1 / sqrt(2)
    parameters = {
        "norm.weight": [1.0000049999875] * 4,  # sqrt(1 + 1e-5)
        "norm.bias": [0.0] * 4,
        "query.weight": [[a, 0, 0, 0], [0, a, 0, 0], [0, 0, a, 0], [0, 0, 0, a]],
        "key.weight": [[0.0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]],
        "value.weight": [[0.0, 0, 2, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 3, 0, 0]],
        "position.weight": [[0.0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]],
        "content_bias": [0, a, a, 0],
        "position_bias": [-a, 0, 0, a],
        "persistent_keys": [[0, -half, -half, half]],
        "persistent_values": [[4.0, 0, 0, 1]],
        "output.weight": [[1.0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 2], [-1, 0, 1, 0]],
        "bias": [0.5, 0, -0.5, 1],
    }
    layer.load_state_dict({name: torch.tensor(value).double() for name, value in parameters.items()})
    positions = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, -1]]).double()  # p of distance 0, 1, 2
    x, memory = torch.tensor([HAND_X]).double(), torch.tensor([[HAND_MEMORY]]).double()
    gates = None if multipliers is None else torch.tensor(multipliers)
    torch.testing.assert_close(
        layer(x, memory, positions, window, gates), torch.tensor([expected]).double(), rtol=0, atol=1e-6
    )


def test_initial_values() -> None:
    """Persistent keys N(0, 1/d_h), values N(0, 1/N), others N(0, 1/inputs); biases and u, v zero."""
    sizes = {"width": 256, "heads": 4, "persistent_vectors": 400, "feed_forward": 900}
    layer = AllAttention(small_config(layers=1, **sizes), 0)
    for name, std in {
        "persistent_keys": 64**-0.5,
        "persistent_values": 400**-0.5,
        "query.weight": 256**-0.5,
        "key.weight": 256**-0.5,
        "value.weight": 256**-0.5,
        "position.weight": 256**-0.5,
        "output.weight": 256**-0.5,
        "content_bias": 0.0,
        "position_bias": 0.0,
        "bias": 0.0,
        "feed_forward.inner.weight": 256**-0.5,
        "feed_forward.inner.bias": 0.0,
        "feed_forward.outer.weight": 900**-0.5,
        "feed_forward.outer.bias": 0.0,
    }.items():
        values = layer.get_parameter(name)
        assert values.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(values.mean().item()) <= 5 * std / math.sqrt(values.numel()), name


def test_projection_dropout_covers_sum_and_bias_but_not_the_residual() -> None:
    layer = randomised(AllAttention(small_config(projection_dropout=0.5), 0).double())
    x, memory, positions = leaf(3, 6, 12), leaf(3, 4, 12), leaf(10, 12)
    added = layer.eval()(x, memory, positions, 4) - x
    ratio = (layer.train()(x, memory, positions, 4) - x) / added
    dropped = ratio.abs() < 1e-9
    assert 0.3 < dropped.double().mean() < 0.7
    assert_close(ratio[~dropped], torch.full_like(ratio[~dropped], 2.0), 1e-9)


def test_feed_forward_dropouts_cover_hidden_units_and_what_is_added() -> None:
    """One hidden unit that is always 1: kept, it adds its outgoing weights twofold; dropped, nothing."""
    layer = AllAttention(small_config(feed_forward=1, feed_forward_dropout=0.5), 0).double()
    sublayer = layer.feed_forward
    assert sublayer is not None
    with torch.no_grad():
        layer.output.weight.zero_()
        sublayer.inner.weight.zero_()
        sublayer.inner.bias.fill_(1)
        sublayer.outer.weight.fill_(3)
    x, memory, positions = leaf(20, 6, 12), leaf(20, 4, 12), leaf(10, 12)
    added = layer.train()(x, memory, positions, 4) - x
    assert_close(added, added[..., :1].expand_as(added), 1e-12)
    assert added[..., 0].round().unique().tolist() == [0, 6]
    layer.dropout.p = 0.5
    added = layer(x, memory, positions, 4) - x
    assert added.round().unique().tolist() == [0, 12]
    assert not torch.equal(added.round(), added[..., :1].round().expand_as(added)), "of single dimensions"
    assert_close(layer.eval()(x, memory, positions, 4) - x, torch.full_like(x, 3), 1e-12)


def test_attention_dropout_in_training_only() -> None:
    """Many equal rows, each with its own mask: their mean is the result without dropout."""
    layer = randomised(AllAttention(small_config(attention_dropout=0.3), 0).double())
    x, memory, positions = leaf(1, 3, 12), leaf(1, 4, 12), leaf(7, 12)
    expected = layer.eval()(x, memory, positions, 4)[0]
    assert torch.equal(layer(x, memory, positions, 4)[0], expected)
    rows = layer.train()(x.expand(3000, -1, -1), memory.expand(3000, -1, -1), positions, 4).detach()
    assert not torch.equal(rows[0], rows[1])
    error = (rows.mean(0) - expected).abs() / (rows.std(0) / math.sqrt(len(rows)))
    assert error.max() < 5
