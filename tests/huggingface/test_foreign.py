"""Heads of causal language models of others: what is seen of them, and what a change of Z does."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.foreign_models import KINDS, padded, row, tiny
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.heads.watched import Attention, Visitor
from allattn.huggingface.foreign import ForeignModel

PATTERNS = {"gpt2": "transformer.h.*.attn.c_proj", "gpt_neox": "gpt_neox.layers.*.attention.dense"}


class Recorder(Visitor):
    """Keeps everything that it is shown."""

    wants_attention = True

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.values: list[Tensor] = []
        self.zs: list[Tensor] = []
        self.ys: list[Tensor] = []
        self.streams: list[Tensor] = []

    def begins(self, real: Tensor) -> None:
        self.real = real

    def attention(self, layer: int, attention: Attention) -> None:
        assert len(self.zs) == layer == len(self.weights)
        assert attention.memory == attention.persistent == 0
        self.weights.append(attention.weights)
        self.values.append(attention.values)

    def z(self, layer: int, z: Tensor) -> None:
        self.zs.append(z)

    def y(self, layer: int, y: Tensor) -> None:
        self.ys.append(y)

    def stream(self, layer: int, x: Tensor) -> None:
        self.streams.append(x)


class Times(Visitor):
    """Multiplies Z of every head by its own number."""

    def __init__(self, factors: list[Tensor]) -> None:
        self.factors = factors  # (h,) of each layer

    def z(self, layer: int, z: Tensor) -> Tensor:
        return z * self.factors[layer].to(z.dtype).unsqueeze(-1)


def recorded(model: ForeignModel, rows: list[Tensor], left: bool) -> tuple[Recorder, Tensor]:
    recorder = Recorder()
    with torch.no_grad(), model.watch(recorder):
        nats, memory = model.nats(padded(rows, left))
    assert memory is None
    return recorder, nats


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen(kind: str) -> None:
    """Attention weights and stream are transformers' own outputs; Z = A V; Y = sum of Z_h WO^(h) + bias."""
    network = tiny(kind)
    model = ForeignModel(network)
    tokens = row(9)
    seen, nats = recorded(model, [tokens], left=False)
    eager = copy.deepcopy(network)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        own = eager(input_ids=tokens[None], output_attentions=True, output_hidden_states=True)
    expected = F.cross_entropy(own.logits[0, :-1], tokens[1:], reduction="none")
    torch.testing.assert_close(nats[0, :-1], expected, rtol=1e-5, atol=1e-5)
    assert nats[0, -1] == 0
    for index, layer in enumerate(model.layers):
        torch.testing.assert_close(seen.weights[index], own.attentions[index])
        values = seen.values[index].repeat_interleave(layer.heads // layer.groups, dim=2)
        z = torch.einsum("bhqk,bkhv->bqhv", seen.weights[index], values)
        torch.testing.assert_close(seen.zs[index], z, rtol=1e-5, atol=1e-5)
        y = torch.einsum("bthv,hvd->btd", z, layer.output_blocks())
        bias = layer.output_bias()
        y = y if bias is None else y + bias
        torch.testing.assert_close(seen.ys[index], y, rtol=1e-5, atol=1e-5)
    for stream, hidden in zip(seen.streams[:-1], own.hidden_states[1:], strict=False):
        torch.testing.assert_close(stream, hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_every_row_the_numbers_that_it_has_alone(kind: str, left: bool) -> None:
    model = ForeignModel(tiny(kind))
    rows = [row(9), row(5, seed=4)]
    together, nats = recorded(model, rows, left)
    for number, tokens in enumerate(rows):
        alone, own = recorded(model, [tokens], left)
        here = together.real[number]
        torch.testing.assert_close(nats[number, here], own[0], rtol=1e-5, atol=2e-5)
        for index in range(len(model.layers)):
            weights = together.weights[index][number]
            torch.testing.assert_close(
                weights[:, here][:, :, here], alone.weights[index][0], rtol=1e-4, atol=1e-5
            )
            assert not weights[:, ~here].any()
            assert not weights[..., ~here].any()
            z = together.zs[index][number, here]
            torch.testing.assert_close(z, alone.zs[index][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_z_is_zeroing_the_block_of_the_output_projection(kind: str) -> None:
    network = tiny(kind)
    model = ForeignModel(network)
    gates = [torch.tensor([1.0, 0, 1, 1, 0, 1]), torch.zeros(6), torch.ones(6)]
    batch = padded([row(9), row(5, seed=4)], left=True)
    with torch.no_grad(), model.watch(Times(gates)):
        zeroed, _ = model.nats(batch)
    other = ForeignModel(copy.deepcopy(network))
    with torch.no_grad():
        dense, _ = model.nats(batch)
        for layer, gate in zip(other.layers, gates, strict=True):
            layer.output_blocks()[gate == 0] = 0  # a view of the weights
        torch.testing.assert_close(zeroed, other.nats(batch)[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(zeroed, dense, atol=1e-2)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_gradients_of_what_a_visitor_returns(kind: str) -> None:
    """Against differences of nats in float64, which these two kinds compute throughout."""
    model = ForeignModel(tiny(kind, num_hidden_layers=2).double())
    batch = padded([row(9), row(5, seed=4)], left=False)
    factors = torch.full((2, 6), 0.7, dtype=torch.float64, requires_grad=True)

    def total(of: Tensor) -> Tensor:
        with model.watch(Times(list(of))):
            return model.nats(batch)[0].sum()

    assert torch.autograd.gradcheck(total, factors, eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("error", [True, False], ids=["after an error", "after the block"])
def test_nothing_is_left(error: bool) -> None:
    network = tiny("gemma3_text")
    model = ForeignModel(network)
    batch = padded([row(5)], left=False)
    before, _ = model.nats(batch)

    class Falls(Visitor):
        wants_attention = True

        def z(self, layer: int, z: Tensor) -> Any:
            if error and layer:
                raise ZeroDivisionError
            return torch.zeros_like(z)

    try:
        with model.watch(Falls()), model.watch(Falls()):
            assert network.config._attn_implementation == "allattn_watched"
            model.nats(batch)
    except ZeroDivisionError:
        assert error
    assert hooks(network) == 0
    assert network.config._attn_implementation == "sdpa"
    assert torch.equal(model.nats(batch)[0], before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_named_by_the_user_is_the_one_that_is_found(kind: str) -> None:
    network = tiny(kind)
    named = ForeignModel(network, PATTERNS.get(kind, "model.layers.*.self_attn.o_proj"))
    found = ForeignModel(network)
    for one, other in zip(named.layers, found.layers, strict=True):
        assert (one.heads, one.groups) == (other.heads, other.groups)
        assert torch.equal(one.output_blocks(), other.output_blocks())


@pytest.mark.parametrize(
    ("projection", "said"),
    [
        ("model.layers.*.self_attn.out", "no layer has self_attn.out; the first has self_attn.q_proj"),
        ("decoder.*.o_proj", "it has model.layers"),
        ("model.layers.0.self_attn.o_proj", r"LAYERS\.\*\.PROJECTION"),
        ("model.layers.*.mlp.gate_proj", "24 numbers"),
        ("model.layers.*.input_layernorm", "a LlamaRMSNorm, neither"),
    ],
)
def test_a_projection_that_is_none(projection: str, said: str) -> None:
    if "gate_proj" in projection:
        network, said = (
            tiny("llama", hidden_size=28, num_attention_heads=2, num_key_value_heads=1),
            "28 numbers",
        )
        network.config.num_attention_heads = 6
    else:
        network = tiny("llama")
    with pytest.raises(InputError, match=said):
        ForeignModel(network, projection)


def test_an_unknown_architecture_names_the_setting() -> None:
    network = tiny("llama")
    for layer in network.model.layers:
        layer.self_attn.out = layer.self_attn.o_proj
        del layer.self_attn.o_proj
    with pytest.raises(InputError, match=r"model_type=llama: .*projection=model\.layers"):
        ForeignModel(network)


def test_a_class_without_attention_weights_is_named() -> None:
    network = tiny("llama")

    class Strange(type(network.model.layers[0].self_attn)):  # type: ignore[misc]
        """Its module has no eager function."""

    for layer in network.model.layers:
        layer.self_attn.__class__ = Strange
    with (
        pytest.raises(InputError, match="Strange gives no attention weights"),
        ForeignModel(network).watch(Recorder()),
    ):
        pass
    assert hooks(network) == 0


def test_bfloat16_sums_in_float32() -> None:
    model = ForeignModel(tiny("llama").bfloat16())
    _, nats = recorded(model, [row(9)], left=False)
    assert nats.dtype == torch.float32
    assert bool(nats.isfinite().all())
