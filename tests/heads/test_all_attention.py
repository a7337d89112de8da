"""Our models under a visitor: what it sees against loops in float64, and that nothing of it is left."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hand_made import rows_of
from torch import Tensor

from allattn.heads.all_attention import OwnModel
from allattn.heads.masks import StaticMask
from allattn.heads.scores import sequence_scores
from allattn.heads.watched import Attention, Batch, Visitor
from allattn.model import cache
from allattn.model.attention import AllAttention
from allattn.model.language_model import AllAttentionLM

Models = Callable[..., AllAttentionLM]

KEPT, SCALE = [[0, 2, 5], [], [1, 3, 4, 7]], [8 / 3, 8.0, 2.0]
FAMILIES = {"all-attention": {}, "transformer-xl": {"persistent_vectors": 0, "feed_forward": 24}}


class Recorder(Visitor):
    """Keeps all that it is shown, by layer, of the last pass."""

    wants_attention = True

    def begins(self, real: Tensor) -> None:
        self.real = real
        self.seen: dict[str, dict[int, Any]] = {name: {} for name in ("attention", "z", "y", "stream")}

    def attention(self, layer: int, attention: Attention) -> None:
        assert layer not in self.seen["z"]
        self.seen["attention"][layer] = attention

    def z(self, layer: int, z: Tensor) -> None:
        self.seen["z"][layer] = z

    def y(self, layer: int, y: Tensor) -> None:
        assert layer in self.seen["z"]
        self.seen["y"][layer] = y

    def stream(self, layer: int, x: Tensor) -> None:
        self.seen["stream"][layer] = x


def segments() -> list[Batch]:
    """Three segments of two rows, the second of which ends in the last one."""
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 15, dtype=torch.bool)
    real[1, 12:] = False
    targets = ids[:, 1:].masked_fill(~real, -100)
    parts = zip(ids[:, :-1].split(5, 1), targets.split(5, 1), real.split(5, 1), strict=True)
    return [Batch(*part) for part in parts]


def looked_at(
    layer: AllAttention, normed: Tensor, table: Tensor, at: int, head: int
) -> tuple[Tensor, Tensor]:
    """Weights (S + N,) and values (S + N, c) of one head at one query, from the method's formulas."""
    c, window = layer.head_width, len(table) - 1
    block = slice(head * c, (head + 1) * c)
    q = layer.query.weight[block] @ normed[at]
    scores = []
    for j in range(len(normed)):
        if not 0 <= at - j <= window:
            scores.append(torch.tensor(-math.inf, dtype=q.dtype))
            continue
        content = (q + layer.content_bias[block]) @ (layer.key.weight[block] @ normed[j])
        position = (q + layer.position_bias[block]) @ (layer.position.weight[block] @ table[at - j])
        scores.append((content + position) / math.sqrt(c))
    scores += list(layer.persistent_keys[:, block] @ q)  # their factor sqrt(c) is gone
    values = [layer.value.weight[block] @ row for row in normed]
    values += list(layer.persistent_values[:, block] * math.sqrt(len(layer.persistent_values)))
    return torch.stack(scores).softmax(0), torch.stack(values)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_is_seen(random_model: Models, family: str) -> None:
    """Of a cut model, two segments with memory: A, V, Z = A V without s_g, Y with it and the bias."""
    sizes = {"layers": 3, "heads_kept": KEPT, "output_scale": SCALE, **FAMILIES[family]}
    model = random_model(torch.float64, **sizes)
    own, recorder = OwnModel(model), Recorder()
    assert [layer.heads for layer in own.layers] == [layer.groups for layer in own.layers] == [3, 0, 4]
    assert own.layers[1].output_blocks().shape == (0, 4, 32)
    memory = model.empty_memory(2)
    for batch in segments()[:2]:
        with own.watch(recorder):
            nats, after = own.nats(batch, memory)
        torch.testing.assert_close(nats, model(batch.ids, batch.targets, memory)[0], rtol=0, atol=0)
        assert torch.equal(recorder.real, batch.real)
        x = model.embedding(batch.ids)
        table = model.positions.table[: min(model.config.memory_length, memory[0].shape[1] + 4) + 1]
        for index, layer in enumerate(model.stack):
            if not layer.heads_kept:
                assert all(index not in seen for seen in recorder.seen.values())
                x = layer.after_heads(x, None)
                continue
            seen = {name: found[index] for name, found in recorder.seen.items()}
            attention, y = seen["attention"], layer.bias.expand_as(x).clone()
            kept = memory[index].shape[1]
            assert (attention.memory, attention.persistent) == (kept, len(layer.persistent_values))
            for row in range(2):
                normed = layer.norm(torch.cat([memory[index][row], x[row]]))
                for head, block in enumerate(own.layers[index].output_blocks()):
                    for query in range(5):
                        a, v = looked_at(layer, normed, table, kept + query, head)
                        torch.testing.assert_close(attention.weights[row, head, query], a)
                        torch.testing.assert_close(attention.values[row, :, head], v)
                        torch.testing.assert_close(seen["z"][row, query, head], a @ v)
                        y[row, query] += a @ v @ block
            torch.testing.assert_close(seen["y"], y)
            x = x + y if layer.feed_forward is None else x + y + layer.feed_forward(x + y)
            torch.testing.assert_close(seen["stream"], x)
        memory = after
    bias = own.layers[2].output_bias()
    assert torch.equal(bias, model.layers[2].bias)


class Falls(Recorder):
    """Fails in the last layer, and where there is dropout."""

    def __init__(self, model: AllAttentionLM) -> None:
        self.model = model

    def z(self, layer: int, z: Tensor) -> Any:
        if layer == 2:
            raise ZeroDivisionError
        assert not self.model.training
        super().z(layer, z)
        return torch.zeros_like(z)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_also_after_an_error(random_model: Models, training: bool) -> None:
    model = random_model(layers=3, attention_dropout=0.5, word_dropout=0.5).train(training)
    own, (batch, *_) = OwnModel(model), segments()
    cores = [layer.core for layer in model.stack]
    with pytest.raises(ZeroDivisionError), own.watch(Recorder()), own.watch(Falls(model)):
        own.nats(batch)
    assert [layer.core for layer in model.stack] == cores
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training == all(layer.training for layer in model.layers) == training
    model.eval()
    before, _ = model(batch.ids, batch.targets, model.empty_memory(2))
    assert torch.equal(own.nats(batch)[0], before)
    with own.watch(Recorder()):
        assert torch.equal(own.nats(batch)[0], before), "what attention weights cost changes no number"


def test_several_watch_what_those_before_have_changed(random_model: Models) -> None:
    own, inner, outer = OwnModel(random_model(layers=2)), Recorder(), Recorder()
    gates = [torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1]), torch.ones(8)]
    with own.watch(outer), own.watch(StaticMask(gates)), own.watch(inner):
        own.nats(segments()[0])
    assert bool(outer.seen["z"][0][:, :, 1].any())
    assert not inner.seen["z"][0][:, :, 1].any()
    assert torch.equal(outer.seen["z"][0][:, :, 2:], inner.seen["z"][0][:, :, 2:])
    one, other = (recorder.seen["attention"][1].weights for recorder in (inner, outer))
    assert torch.equal(one, other)


def test_a_mask_acts_where_a_text_is_read_word_by_word(random_model: Models) -> None:
    """As in generation: the cache's steps give what the forward pass gives."""
    model = random_model(torch.float64, layers=3, heads_kept=KEPT, output_scale=SCALE)
    gates = [torch.tensor([1.0, 0, 1]), torch.empty(0), torch.tensor([0.0, 1, 1, 0])]
    ids = torch.randint(50, (2, 4), generator=torch.Generator().manual_seed(1))
    own = OwnModel(model)
    shown: list[Tensor] = []

    class Begins(Visitor):
        def begins(self, real: Tensor) -> None:
            shown.append(real)

    with torch.no_grad(), own.watch(StaticMask(gates)), own.watch(Begins()):
        hidden, _ = model.hidden(ids, model.empty_memory(2))
        _, kept = cache.read(model, ids[:, :1])
        shown.clear()
        for word in range(1, 4):
            torch.testing.assert_close(cache.step(model, ids[:, word], kept), hidden[:, word])
    assert [real.tolist() for real in shown] == [[[True], [True]]] * 3
    assert not torch.allclose(hidden, model.hidden(ids, model.empty_memory(2))[0])


def test_gradients_of_what_a_visitor_returns(random_model: Models) -> None:
    own = OwnModel(random_model(torch.float64, layers=2))
    batch = segments()[2]

    def total(factors: Tensor) -> Tensor:
        class Times(Visitor):
            def z(self, layer: int, z: Tensor) -> Tensor:
                return z * factors[layer].unsqueeze(-1)

        with own.watch(Times()):
            return own.nats(batch)[0].sum()

    factors = torch.full((2, 8), 0.7, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(total(factors), factors)
    steps = 1e-5 * torch.eye(16, dtype=torch.float64).view(16, 2, 8)
    with torch.no_grad():
        slopes = [(total(factors + step) - total(factors - step)) / 2e-5 for step in steps]
    torch.testing.assert_close(found.flatten(), torch.stack(slopes), rtol=1e-5, atol=1e-7)


def test_padding_before_a_token_is_no_text_of_ours(random_model: Models) -> None:
    own = OwnModel(random_model())
    with pytest.raises(ValueError, match="padding at the end"):
        own.nats(rows_of(5, 3, left=True))
    own.nats(rows_of(5, 0, 3))


def test_scores_do_not_depend_on_the_rows_read_together(random_model: Models) -> None:
    """Memory and padding at the end: a row has the scores that it has alone."""
    own, names = OwnModel(random_model(torch.float64)), ["aeqd", "avvn", "lthon_ln", "circuit_ahon_ln"]
    together = sequence_scores(own, segments(), names, memory=True)
    rows = [
        [
            Batch(
                batch.ids[row : row + 1, :n], batch.targets[row : row + 1, :n], batch.real[row : row + 1, :n]
            )
            for batch in segments()
            if (n := int(batch.real[row].sum()))
        ]
        for row in (0, 1)
    ]
    alone = [sequence_scores(own, text, names, memory=True) for text in rows]
    for name in names:
        for layer, values in enumerate(together[name]):
            apart = torch.stack([found[name][layer] for found in alone], dim=1).flatten(0, 1)  # by segment
            torch.testing.assert_close(values, apart)
