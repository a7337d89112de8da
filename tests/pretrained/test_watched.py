"""Heads of pretrained models with gates under a visitor: what it sees, what it changes, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_networks import gated
from torch import Tensor

from allattn.errors import InputError
from allattn.families import watched
from allattn.heads.masks import StaticMask
from allattn.heads.scores import sequence_scores, text_scores
from allattn.heads.watched import Batch, Visitor
from allattn.huggingface.foreign import ForeignModel
from allattn.pretrained.language_model import PretrainedLM
from allattn.pruning.surgery import cut_model, plan_removal

OPEN = [[1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0] * 6]
CLOSE = {"rtol": 0.0, "atol": 1e-11}


def batch() -> Batch:
    """Two rows; the second has two tokens less."""
    ids = torch.randint(1, 300, (2, 10), generator=torch.Generator().manual_seed(5))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 7:] = False
    return Batch(ids[:, :-1], ids[:, 1:].masked_fill(~real, -1), real)


def reduced(kind: str, masked: bool) -> PretrainedLM:
    """With the closed heads of OPEN gone and s_g above 1."""
    model = gated(kind)
    if masked:
        model.config = replace(model.config, masked=True)
    return cut_model(model, plan_removal(model.config, [torch.tensor(layer) for layer in OPEN], True))


class Keeping(Visitor):
    def begins(self, real: Tensor) -> None:
        self.seen: dict[str, Any] = {"real": real}

    def z(self, layer: int, z: Tensor) -> None:
        self.seen[f"z{layer}"] = z

    def y(self, layer: int, y: Tensor) -> None:
        self.seen[f"y{layer}"] = y

    def stream(self, layer: int, x: Tensor) -> None:
        self.seen[f"x{layer}"] = x


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
@torch.no_grad()
def test_a_dense_model_shows_what_it_shows_without_gates(kind: str) -> None:
    model, one, other = gated(kind), Keeping(), Keeping()
    own, foreign = watched(model), ForeignModel(model.network)
    with own.watch(one):
        nats, memory = own.nats(batch())
    with foreign.watch(other):
        expected, _ = foreign.nats(batch())
    real = batch().real
    assert memory is None
    torch.testing.assert_close(nats[real], expected[real].to(nats), rtol=1e-6, atol=1e-6)
    assert one.seen.keys() == other.seen.keys()
    for name, tensor in other.seen.items():
        torch.testing.assert_close(one.seen[name][real], tensor[real])
    for layer, there in zip(own.layers, foreign.layers, strict=True):
        assert (layer.heads, layer.groups) == (there.heads, there.groups)
        assert torch.equal(layer.output_blocks(), there.output_blocks())
        bias, wanted = layer.output_bias(), there.output_bias()
        assert (bias is None and wanted is None) or torch.equal(bias, wanted)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "cut"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_a_reduced_model_shows_the_heads_that_it_has(kind: str, masked: bool) -> None:
    """Y is the sum of Z_h WO^(h) with s_g inside, and zeroing Z is closing the gate."""
    model, keeping = reduced(kind, masked), Keeping()
    own = watched(model)
    with own.watch(keeping):
        nats, _ = own.nats(batch())
    torch.testing.assert_close(nats, model(batch().ids, batch().targets, [])[0], **CLOSE)
    assert [layer.heads for layer in own.layers] == [5, 3, 0]
    for index in (0, 1):
        layer = own.layers[index]
        y = torch.einsum("bthv,hvd->btd", keeping.seen[f"z{index}"], layer.output_blocks())
        bias = layer.output_bias()
        torch.testing.assert_close(keeping.seen[f"y{index}"], y if bias is None else y + bias, **CLOSE)
    gates = [torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([0.0, 1, 1]), torch.zeros(0)]
    factors = [gate.double() * model.config.scale(layer) for layer, gate in enumerate(gates)]
    with own.watch(StaticMask(gates)):
        found, _ = own.nats(batch())
    torch.testing.assert_close(found, model(batch().ids, batch().targets, [], factors)[0], **CLOSE)
    assert not torch.allclose(found, nats, atol=1e-3)
    scores = text_scores(own, [batch()], ["circuit_ahon_ln", "wanda", "flap"])
    assert [[len(layer) for layer in layers] for layers in scores.values()] == [[5, 3, 0]] * 3


def test_gradient_scores_are_slopes_at_the_gates() -> None:
    """By differences of the nats, each layer scaled to unit norm."""
    model = gated("gpt2")
    found = text_scores(watched(model), [batch()], ["gradient"])["gradient"]
    slopes = torch.zeros(3, 6, dtype=torch.float64)
    with torch.no_grad():
        for layer in range(3):
            for head in range(6):
                sides = []
                for step in (1e-5, -1e-5):
                    gates = torch.ones(3, 6, dtype=torch.float64)
                    gates[layer, head] += step
                    sides.append(model(batch().ids, batch().targets, [], list(gates))[0].sum())
                slopes[layer, head] = (sides[0] - sides[1]).abs() / 2e-5
    expected = slopes / slopes.norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.stack(found), expected.to(found[0]), rtol=1e-5, atol=1e-7)


def test_nothing_is_left_and_weights_of_attention_are_refused() -> None:
    model = gated("llama").train()
    own = watched(model)
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    with pytest.raises(InputError, match="shows no attention weights"):
        sequence_scores(own, [batch()], ["aeqd_ln"])
    broken = Batch(batch().ids, batch().targets, ~batch().real)
    with pytest.raises(ValueError, match="padding at the end"):
        sequence_scores(own, [broken], ["ahon"])
    after = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert before == after
    assert model.training
