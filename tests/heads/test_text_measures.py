"""Scores of a whole text: magnitude, wanda and flap against loops, gradient against differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.hand_made import HandMade, rows_of
from torch import Tensor

from allattn.data.segments import EvaluationStream
from allattn.heads.all_attention import OwnModel
from allattn.heads.masks import StaticMask
from allattn.heads.ranking import Scope, keep_highest
from allattn.heads.scores import text_scores
from allattn.heads.text_measures import bias_compensation
from allattn.heads.watched import Batch, Visitor
from allattn.model.attention import AllAttention
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import cut_model, plan_removal
from allattn.randomness import generator

UNEVEN = [[0, 2, 5], [], [1, 3, 4, 7]]

Models = Callable[..., AllAttentionLM]
Batches = list[tuple[Tensor, Tensor]]


def scored(model: AllAttentionLM, batches: Batches, name: str) -> list[Tensor]:
    """One score of a text that is read with memory."""
    text = [Batch(inputs, targets, torch.ones_like(inputs, dtype=torch.bool)) for inputs, targets in batches]
    return text_scores(OwnModel(model), text, [name], memory=True)[name]


@pytest.fixture(scope="session")
def batches() -> Batches:
    """Three consecutive segments of two texts; some targets are not scored."""
    words = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    targets = words[:, 1:].clone()
    targets[1, 12:] = -100
    return list(zip(words[:, :-1].split(5, 1), targets.split(5, 1), strict=True))


def head_output(layer: AllAttention, x: Tensor, memory: Tensor, table: Tensor, head: int) -> Tensor:
    """h_i of one head by a loop over rows and queries, (B, T, c), straight from the method's formulas."""
    c, window = layer.head_width, len(table) - 1
    block = slice(head * c, (head + 1) * c)
    normed = layer.norm(torch.cat([memory, x], 1))
    out = x.new_zeros(*x.shape[:2], c)
    persistent_keys = layer.persistent_keys[:, block] * math.sqrt(c)
    persistent_values = layer.persistent_values[:, block] * math.sqrt(len(layer.persistent_values))
    for row in range(x.shape[0]):
        k = normed[row] @ layer.key.weight[block].T
        v = normed[row] @ layer.value.weight[block].T
        for query in range(x.shape[1]):
            at = memory.shape[1] + query
            seen = range(max(0, at - window), at + 1)
            q = layer.query.weight[block] @ normed[row, at]
            scores = [
                (q + layer.content_bias[block]) @ k[j]
                + (q + layer.position_bias[block]) @ (layer.position.weight[block] @ table[at - j])
                for j in seen
            ]
            scores += list(persistent_keys @ q)
            weights = (torch.stack(scores) / math.sqrt(c)).softmax(0)
            out[row, query] = weights @ torch.cat([v[list(seen)], persistent_values])
    return out


@torch.no_grad()
def magnitude_by_loops(model: AllAttentionLM, batches: Batches) -> list[list[float]]:
    norms: list[list[list[Tensor]]] = [[[] for _ in layer.heads_kept] for layer in model.layers]
    memories = model.empty_memory(2)
    window = model.config.memory_length
    table = model.positions.table[: window + 1]
    for inputs, targets in batches:
        x = model.embedding(inputs)
        for index, layer in enumerate(model.layers):
            memory = memories[index]
            memories[index] = torch.cat([memory, x], 1)[:, -window:]
            total = layer.bias.expand_as(x)
            for head in range(len(layer.heads_kept)):
                out = head_output(layer, x, memory, table, head)
                counted = (layer.scale * out.pow(2).sum(-1).sqrt())[targets >= 0]  # as it counts: s_g h_i
                norms[index][head].append(counted)
                block = layer.output.weight[:, head * layer.head_width : (head + 1) * layer.head_width]
                total = total + layer.scale * out @ block.T
            x = x + total
    scores = []
    for layer, by_head in zip(model.layers, norms, strict=True):
        blocks = layer.output.weight.split(layer.head_width, 1)
        scores.append(
            [
                float(blocks[head].pow(2).sum().sqrt() * torch.cat(found).mean())
                for head, found in enumerate(by_head)
            ]
        )
    return scores


@pytest.mark.parametrize("kept", [None, UNEVEN], ids=["dense", "cut"])
def test_magnitude_is_block_norm_times_output_norm(
    random_model: Models, batches: Batches, kept: list[list[int]] | None
) -> None:
    scales = None if kept is None else [8 / max(len(heads), 1) for heads in kept]
    model = random_model(torch.float64, heads_kept=kept, output_scale=scales)
    found = scored(model, batches, "magnitude")
    expected = magnitude_by_loops(model, batches)
    assert [len(layer) for layer in found] == [len(layer) for layer in expected]
    for layer, values in zip(found, expected, strict=True):
        torch.testing.assert_close(layer.double(), torch.tensor(values, dtype=torch.float64))


def test_magnitude_by_hand(random_model: Models) -> None:
    """Two rows with warm-up and filler: each of the seven targets counts once.

    Without queries and values a token sees n others and itself as evenly as the two persistent vectors, so
    its output is 2 / (2 + n) of theirs; n = 1, 2, 3, and from then on 4, the memory of 3 and itself.
    """
    model = random_model(torch.float64, layers=1, heads=2, persistent_vectors=2, memory_length=3)
    layer = model.layers[0]
    with torch.no_grad():
        for parameter in (layer.query.weight, layer.value.weight, layer.content_bias, layer.position_bias):
            parameter.zero_()
        layer.persistent_values.fill_(1 / math.sqrt(2))  # 1 in use
        layer.output.weight[:, 16:] = 2 * layer.output.weight[:, :16]
    stream = EvaluationStream(np.arange(8, dtype=np.int32), rows=2, segment_length=3, warm_up=3)
    assert [[row.first, row.scored, row.end] for row in stream.rows] == [[1, 1, 4], [1, 4, 8]]
    (scores,) = scored(model, [(segment.inputs, segment.targets) for segment in stream], "magnitude")
    mean = 4 * (2 / 3 + 2 / 4 + 2 / 5 + 4 * 2 / 6) / 7  # a vector of 16 ones has norm 4
    block = float(layer.output.weight.detach()[:, :16].square().sum().sqrt())
    assert scores.tolist() == pytest.approx([mean * block, 2 * mean * block], rel=1e-12)


def gradients_by_differences(model: AllAttentionLM, batches: Batches, step: float) -> list[Tensor]:
    """|dL / d gate| of every head and segment by central differences, each layer scaled to unit norm."""
    sizes = [len(layer.heads_kept) for layer in model.layers]
    scores = [torch.zeros(size, dtype=torch.float64) for size in sizes]

    @torch.no_grad()
    def losses(layer: int, head: int, gate: float) -> list[float]:
        """Loss of each segment with one gate moved in it, and open in the segments before."""
        found, memory = [], model.empty_memory(2)
        for inputs, targets in batches:
            gates = [torch.full((s,), x.scale).double() for s, x in zip(sizes, model.layers, strict=True)]
            _, after = model(inputs, targets, memory, gates)
            gates[layer][head] *= gate
            nats, _ = model(inputs, targets, memory, gates)
            found.append(float(nats.sum()))
            memory = after
        return found

    for layer, size in enumerate(sizes):
        for head in range(size):
            above, below = losses(layer, head, 1 + step), losses(layer, head, 1 - step)
            for a, b in zip(above, below, strict=True):
                scores[layer][head] += abs(a - b) / (2 * step)
    return [layer / layer.norm() if len(layer) else layer for layer in scores]


@pytest.mark.parametrize("kept", [None, UNEVEN], ids=["dense", "cut"])
def test_gradient_is_the_losses_slope_at_open_gates(
    random_model: Models, batches: Batches, kept: list[list[int]] | None
) -> None:
    scales = None if kept is None else [8 / max(len(heads), 1) for heads in kept]
    model = random_model(torch.float64, heads_kept=kept, output_scale=scales)
    found = scored(model, batches, "gradient")
    expected = gradients_by_differences(model, batches, 1e-5)
    for layer, values in zip(found, expected, strict=True):
        torch.testing.assert_close(layer.double(), values, rtol=1e-4, atol=1e-6)
        assert len(layer) == 0 or float(layer.norm()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["magnitude", "gradient"])
def test_scoring_leaves_the_model_as_it_was(random_model: Models, batches: Batches, name: str) -> None:
    model = random_model(attention_dropout=0.5, projection_dropout=0.5, word_dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = scored(model, batches, name)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for one, other in zip(first, scored(model, batches, name), strict=True):
        assert torch.equal(one, other), "no dropout noise in the scores"


def test_a_head_that_does_nothing_is_the_first_to_go(random_model: Models, batches: Batches) -> None:
    model = random_model()
    with torch.no_grad():
        model.layers[1].output.weight[:, 3 * 4 : 4 * 4] = 0
    for scores in (scored(model, batches, "magnitude"), scored(model, batches, "gradient")):
        gates = keep_highest(scores, 23, Scope.all_layers)
        assert [(layer, int(g.argmin())) for layer, g in enumerate(gates) if not g.all()] == [(1, 3)]


def test_random_scores_follow_the_seed(random_model: Models) -> None:
    model = OwnModel(random_model(heads_kept=UNEVEN))

    def drawn(seed: int) -> list[Tensor]:
        return text_scores(model, [], ["random"], noise=generator(seed, "selection"))["random"]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert [len(layer) for layer in first] == [3, 0, 4]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


class Keeping(Visitor):
    """Z of every layer and pass."""

    def __init__(self) -> None:
        self.zs: dict[int, list[Tensor]] = {}

    def z(self, layer: int, z: Tensor) -> None:
        self.zs.setdefault(layer, []).append(z)


def test_wanda_and_flap_are_those_of_the_loops() -> None:
    """Column by column; the two tokens of a row that are not scored do not count."""
    model, text = HandMade(heads=[4, 2]), [rows_of(6, 3), rows_of(2, 5)]
    text[0].targets[0, :2] = -1
    keeping = Keeping()
    with model.watch(keeping):
        for batch in text:
            model.nats(batch)
    found = text_scores(model, text, ["flap", "wanda"])
    for layer, heads in enumerate((4, 2)):
        blocks, columns = model.layers[layer].blocks, {}
        for head in range(heads):
            for v in range(3):
                read = [
                    float(z[row, i, head, v])
                    for batch, z in zip(text, keeping.zs[layer], strict=True)
                    for row in range(2)
                    for i in range(z.shape[1])
                    if batch.targets[row, i] >= 0
                ]
                assert len(read) == 3 + 2 + 1 + 4
                written = blocks[head, v].tolist()
                mean = sum(read) / len(read)
                columns[head, v] = {
                    "wanda": sum(map(abs, written)) / 8 * math.sqrt(sum(x * x for x in read) / len(read)),
                    "flap": sum((x - mean) ** 2 for x in read) / len(read) * sum(w * w for w in written),
                }
        raw = [column["flap"] for column in columns.values()]
        centre = sum(raw) / len(raw)
        spread = math.sqrt(sum((x - centre) ** 2 for x in raw) / len(raw))
        wanda = [sum(columns[head, v]["wanda"] for v in range(3)) for head in range(heads)]
        flap = [
            sum((columns[head, v]["flap"] - centre) / spread for v in range(3)) / 3 for head in range(heads)
        ]
        assert found["wanda"][layer].tolist() == pytest.approx(wanda, rel=1e-6)
        assert found["flap"][layer].tolist() == pytest.approx(flap, rel=1e-5, abs=1e-6)


def test_a_constant_head_is_what_flap_can_best_replace() -> None:
    """Its output is its mean, so the bias stands in for it exactly; wanda and magnitude do not see that."""
    model, text = HandMade(heads=[4], groups=4), [rows_of(6, 5)]
    model.table[:, 0] = 1.0  # a coordinate that all words share
    model.layers[0].value[:, 1] = 0
    model.layers[0].value[0, 1] = 100.0
    scores = text_scores(model, text, ["flap", "wanda", "magnitude"])
    assert int(scores["flap"][0].argmin()) == 1
    assert int(scores["wanda"][0].argmax()) == int(scores["magnitude"][0].argmax()) == 1
    (bias,) = bias_compensation(model, text, [torch.tensor([1.0, 0, 1, 1])])
    dense, _ = model.nats(text[0])
    model.layers[0].blocks[1] = 0
    model.layers[0].bias += bias
    torch.testing.assert_close(model.nats(text[0])[0], dense)


@pytest.mark.parametrize("family", [{}, {"persistent_vectors": 0, "feed_forward": 24}], ids=["all", "xl"])
def test_cut_and_compensated_is_masked_and_the_mean(random_model: Models, family: dict[str, int]) -> None:
    """Y of a cut layer is that of the masked one and what the masked heads wrote on average over the text."""
    model = random_model(torch.float64, layers=2, heads_kept=[[0, 2, 5], [1, 3, 4, 7]], **family)
    model = cut_model(model, plan_removal(model.config, [torch.ones(3), torch.ones(4)], True))  # s_g 8/3, 2
    ids = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    pieces = zip(ids[:, :-1].split(6, 1), ids[:, 1:].split(6, 1), strict=True)
    text = [Batch(*piece, torch.ones(2, 6, dtype=torch.bool)) for piece in pieces]
    gates = [torch.tensor([1.0, 0, 1]), torch.tensor([0.0, 1, 1, 0])]
    own, keeping = OwnModel(model), Keeping()
    bias = bias_compensation(own, text, gates, memory=True)
    with torch.no_grad(), own.watch(keeping):
        memory = None
        for batch in text:
            _, memory = own.nats(batch, memory)
    for layer, gate in enumerate(gates):
        z = torch.cat([z.flatten(0, 1) for z in keeping.zs[layer]])  # (tokens, h, c)
        written = torch.einsum("thc,hcd->thd", z, own.layers[layer].output_blocks().detach())
        torch.testing.assert_close(bias[layer], written.mean(0)[gate == 0].sum(0))
    cut = cut_model(model, plan_removal(model.config, gates, output_scaling=False))
    ys: list[Tensor] = []

    class First(Visitor):
        def y(self, layer: int, y: Tensor) -> None:
            if layer == 0:
                ys.append(y)

    with torch.no_grad():
        cut.layers[0].bias += bias[0]
        with own.watch(StaticMask(gates)), own.watch(First()):
            own.nats(text[0])
        with OwnModel(cut).watch(First()):
            OwnModel(cut).nats(text[0])
    torch.testing.assert_close(ys[1], ys[0] + bias[0])
