"""Scores of sequences: every one against loops over tokens and heads in float64, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hand_made import HandMade, row_alone, rows_of
from torch import Tensor

from allattn.errors import InputError
from allattn.heads.all_attention import OwnModel
from allattn.heads.scores import (
    MASSES,
    SCORES,
    Inactive,
    SequenceScoring,
    importance,
    sequence_scores,
    text_scores,
)
from allattn.heads.watched import Attention, Batch
from allattn.model.language_model import AllAttentionLM

OF_SEQUENCES = [name for name, score in SCORES.items() if score.per_sequence and name != "random"]
FIRST_TOKEN = ["awft", "ftvvn", "awft_ln", "ftvvn_ln"]


def norm(vector: Tensor) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in vector))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def by_loops(name: str, attention: Attention, z: Tensor, real: list[int], blocks: Tensor) -> list[float]:
    """A score of one sequence, by head; `real` are the places of its tokens, `attention` and `z` its rows."""
    weights, values = attention.weights[0], attention.values[0]
    heads, groups, keys = weights.shape[0], values.shape[1], len(values)
    persistent = keys - attention.persistent
    of_memory, own = list(range(attention.memory)), [attention.memory + i for i in real]
    others = list(range(persistent, keys))
    found = []
    for head in range(heads):
        group = head // (heads // groups)
        if name == "awft":
            found.append(mean([float(weights[head, i, own[0]]) for i in real]))
        elif name == "aeqd":
            entropies = []
            for i in real:
                present = [float(weights[head, i, j]) for j in [*of_memory, *own, *others]]
                entropies.append(-sum(a * math.log(a) for a in present if a > 0))
            found.append(mean(entropies))
        elif name == "ftvvn":
            found.append(norm(values[own[0], group]))
        elif name == "avvn":
            found.append(mean([norm(values[j, group]) for j in [*of_memory, *own, *others]]))
        elif name == "lthon":
            found.append(norm(z[0, real[-1], head]))
        elif name == "ahon":
            found.append(mean([norm(z[0, i, head]) for i in real]))
        elif name == "circuit_ahon":
            found.append(mean([norm(z[0, i, head] @ blocks[head]) for i in real]))
        elif name in MASSES:
            which = {"memory": of_memory, "segment": own, "persistent": others}[name.removeprefix("mass_on_")]
            found.append(mean([sum(float(weights[head, i, j]) for j in which) for i in real]))
        else:
            stem, _, ending = name.rpartition("_")
            top = by_loops(stem, attention, z, real, blocks)
            below = by_loops("ahon" if stem == "lthon" else stem, attention, z, real, blocks)
            below = [mean(below)] * heads if ending == "ln" else below
            return [a / b if b else 0.0 for a, b in zip(top, below, strict=True)]
    return found


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize(("memory", "persistent", "groups"), [(0, 0, 2), (3, 2, 4)])
def test_every_score_is_that_of_the_loops(left: bool, memory: int, persistent: int, groups: int) -> None:
    """Random weights, values and outputs; rows of 5, 2, 0 and 1 tokens. What lies at padding is large."""
    real = rows_of(5, 2, 0, 1, left=left).real
    noise = torch.Generator().manual_seed(1)
    rows, tokens, heads, width, stream = *real.shape, 4, 3, 6
    keys = torch.cat([real.new_ones(rows, memory), real, real.new_ones(rows, persistent)], dim=1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    weights = drawn(rows, heads, tokens, keys.shape[1]).exp() * keys[:, None, None] * real[:, None, :, None]
    weights[0, 1, :, -1 - persistent] = 0  # 0 ln 0 = 0
    weights /= weights.sum(-1, keepdim=True).clamp(min=1e-9)
    values = drawn(rows, keys.shape[1], groups, width) + 50.0 * ~keys[:, :, None, None]
    z = drawn(rows, tokens, heads, width) + 50.0 * ~real[:, :, None, None]
    model = HandMade(heads=[heads], groups=groups, head_width=width)
    model.layers[0].blocks = drawn(heads, width, stream)
    names = [name for name in [*OF_SEQUENCES, *MASSES] if not (memory and name in FIRST_TOKEN)]
    scoring = SequenceScoring(model.layers, names)
    assert scoring.wants_attention
    scoring.begins(real)
    scoring.attention(0, Attention(weights, values, memory, persistent))
    found = scoring.scores(0, z)
    assert list(found) == names
    for name, scores in found.items():
        assert scores.shape == (rows, heads)
        for row in (0, 1, 3):
            here = Attention(weights[row : row + 1], values[row : row + 1], memory, persistent)
            own = real[row].nonzero().flatten().tolist()
            expected = by_loops(name, here, z[row : row + 1], own, model.layers[0].blocks)
            assert scores[row].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padded_rows_have_the_scores_that_they_have_alone(left: bool) -> None:
    """Through a whole grouped-query model; a row of padding alone has none."""
    model, batch = HandMade(heads=[4, 0, 2]), rows_of(6, 3, 0, 1, left=left)
    found = sequence_scores(model, [batch, batch], OF_SEQUENCES)
    alone = sequence_scores(model, [row_alone(batch, row) for row in (0, 1, 3)], OF_SEQUENCES)
    means = text_scores(model, [batch], OF_SEQUENCES)
    assert list(found) == OF_SEQUENCES
    for name, layers in found.items():
        assert [layer.shape for layer in layers] == [(6, 4), (6, 0), (6, 2)]
        for layer, own, of_text in zip(layers, alone[name], means[name], strict=True):
            assert layer.dtype == torch.float32
            torch.testing.assert_close(layer, torch.cat([own, own]))
            torch.testing.assert_close(of_text, own.mean(0))


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_awft_is_alpha_1_of_the_sink_metric(left: bool) -> None:
    """alpha_k = mean of A[i, k] over the queries i >= k that can see k (Gu et al.), at k = 1."""
    model, batch = HandMade(), rows_of(6, 4, left=left)
    seen: list[Tensor] = []

    class Keeping(SequenceScoring):
        def attention(self, layer: int, attention: Attention) -> None:
            seen.append(attention.weights)

        def z(self, layer: int, z: Tensor) -> None:
            pass

    with model.watch(Keeping(model.layers, ["awft"])):
        model.nats(batch)
    found = sequence_scores(model, [batch], ["awft"])["awft"]
    for layer, weights in enumerate(seen):
        for row in range(2):
            places = batch.real[row].nonzero().flatten().tolist()
            k = 1
            seeing = places[k - 1 :]
            for head in range(4):
                total = sum(float(weights[row, head, i, places[k - 1]]) for i in seeing)
                alpha = total / (len(places) - k + 1)
                assert float(found[layer][row, head]) == pytest.approx(alpha, rel=1e-6)


def test_layer_normalized_scores_have_mean_one_over_the_layer() -> None:
    found = sequence_scores(HandMade(), [rows_of(6, 3)], ["ahon_ln", "awft_ln", "lthon", "ahon", "lthon_hn"])
    for name in ("ahon_ln", "awft_ln"):
        for layer in found[name]:
            torch.testing.assert_close(layer.mean(1), torch.ones(2))
    for hn, top, below in zip(found["lthon_hn"], found["lthon"], found["ahon"], strict=True):
        torch.testing.assert_close(hn, top / below)


def test_a_layer_whose_heads_do_nothing_has_scores_of_zero() -> None:
    model = HandMade()
    model.layers[1].value.zero_()
    found = sequence_scores(model, [rows_of(5, 2)], ["ahon_ln", "lthon_hn", "circuit_ahon_ln", "avvn_ln"])
    assert all(not layers[1].any() for layers in found.values())
    assert all(layers[0].all() for layers in found.values())


def test_attention_mass_of_memory_segment_and_persistent_vectors(
    random_model: Callable[..., AllAttentionLM],
) -> None:
    """Heads that look at nothing in particular: each key they see has the same weight."""
    model = random_model(torch.float64, layers=1, persistent_vectors=3, memory_length=4)
    layer = model.layers[0]
    with torch.no_grad():
        for parameter in (layer.query.weight, layer.content_bias, layer.position_bias):
            parameter.zero_()
    ids = torch.randint(50, (2, 4), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.full_like(ids, -1), torch.ones_like(ids, dtype=torch.bool))
    found = sequence_scores(OwnModel(model), [batch, batch], MASSES, memory=True)
    first, second = [1, 2, 3, 4], [1, 2, 3, 4]  # own tokens seen by each query
    expected = {
        "mass_on_memory": (
            0.0,
            mean([(5 - n) / 8 for n in second]),
        ),  # 4 before the query, itself, 3 persistent
        "mass_on_segment": (mean([n / (n + 3) for n in first]), mean([n / 8 for n in second])),
        "mass_on_persistent": (mean([3 / (n + 3) for n in first]), 3 / 8),
    }
    for name, (without, having) in expected.items():
        values = found[name][0].double()
        torch.testing.assert_close(values[:2], torch.full_like(values[:2], without), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(values[2:], torch.full_like(values[2:], having), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("measure", [sequence_scores, text_scores])
@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_scores_of_the_first_token_are_refused_with_memory(measure: Any, name: str) -> None:
    def unread() -> Any:
        raise AssertionError("refused before anything is read")
        yield

    with pytest.raises(InputError, match=f"^{name}: is about the first token"):
        measure(HandMade(), unread(), ["ahon", name], memory=True)


def test_a_mask_by_the_first_token_is_refused_where_a_memory_comes() -> None:
    scoring = SequenceScoring(HandMade().layers, ["ftvvn_ln"])
    scoring.begins(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(InputError, match=r"^ftvvn_ln: is about the first token"):
        scoring.attention(0, Attention(torch.zeros(1, 4, 2, 3), torch.zeros(1, 3, 2, 3), 1, 0))


def test_bfloat16_is_summed_in_float32(random_model: Callable[..., AllAttentionLM]) -> None:
    """Against the same numbers in float64: what is left is the rounding of the model, not of the sums."""
    model = random_model(torch.bfloat16, layers=1)
    ids = torch.randint(50, (2, 300), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.full_like(ids, -1), torch.ones_like(ids, dtype=torch.bool))
    seen: dict[str, Any] = {}

    class Keeping(SequenceScoring):
        def attention(self, layer: int, attention: Attention) -> None:
            super().attention(layer, attention)
            seen["attention"] = attention

        def z(self, layer: int, z: Tensor) -> None:
            seen["found"], seen["z"] = self.scores(layer, z), z

    own = OwnModel(model)
    names = [name for name in OF_SEQUENCES if name not in FIRST_TOKEN]
    with torch.no_grad(), own.watch(keeping := Keeping(own.layers, names)):
        own.nats(batch)
    attention = seen["attention"]
    assert attention.weights.dtype == seen["z"].dtype == torch.bfloat16
    wide = SequenceScoring([_Blocks(own.layers[0].output_blocks().double())], names)
    wide.begins(keeping.real)
    parts = attention.weights.double(), attention.values.double(), attention.memory, attention.persistent
    wide.attention(0, Attention(*parts))
    for name, expected in wide.scores(0, seen["z"].double()).items():
        assert seen["found"][name].dtype == torch.float32
        bound = 400 * torch.finfo(torch.float32).eps  # of sums of 300
        torch.testing.assert_close(seen["found"][name].double(), expected, rtol=bound, atol=0)


class _Blocks:
    heads = groups = 8

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def output_blocks(self) -> Tensor:
        return self._blocks

    def output_bias(self) -> None:
        return None


def test_names_in_the_order_of_the_paper_and_which_end_is_inactive() -> None:
    base = ["awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon"]
    of_text = ["gradient", "magnitude", "wanda", "flap"]
    assert list(SCORES) == [*base, *(f"{name}_ln" for name in base), "lthon_hn", "random", *of_text]
    assert [name for name, score in SCORES.items() if not score.per_sequence] == of_text
    large = [name for name, score in SCORES.items() if score.inactive is Inactive.large]
    assert large == ["awft", "awft_ln"]
    values = [torch.tensor([1.0, 3.0]), torch.tensor([2.0])]
    assert [layer.tolist() for layer in importance("awft", values)] == [[-1, -3], [-2]]
    assert [layer.tolist() for layer in importance("ahon", values)] == [[1, 3], [2]]
