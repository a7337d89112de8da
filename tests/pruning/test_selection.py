"""Heads chosen without gates: scores against independent computations, the choice, and whole tiny runs."""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from support.run_fixtures import MEASURED, Runs, Stop
from support.sameness import assert_same
from torch import Tensor

from allattn.data.corpus import prepare
from allattn.data.segments import EvaluationStream
from allattn.model.attention import AllAttention
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig, Scope, Selection, removal_steps
from allattn.pruning.phase import Phase
from allattn.pruning.selection import (
    gradient_scores,
    heads_after,
    keep_highest,
    magnitude_scores,
    random_scores,
    select_heads,
)
from allattn.randomness import generator
from allattn.settings import PruneSettings
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import Shape
from allattn.training.cutting import cut_checkpoint
from allattn.training.loading import load_model
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import evaluation_stream

OTHERS = [Selection.random, Selection.magnitude, Selection.gradient]
UNEVEN = [[0, 2, 5], [], [1, 3, 4, 7]]

Models = Callable[..., AllAttentionLM]
Batches = list[tuple[Tensor, Tensor]]


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
    found = magnitude_scores(model, batches)
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
    (scores,) = magnitude_scores(model, [(segment.inputs, segment.targets) for segment in stream])
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
    found = gradient_scores(model, batches)
    expected = gradients_by_differences(model, batches, 1e-5)
    for layer, values in zip(found, expected, strict=True):
        torch.testing.assert_close(layer.double(), values, rtol=1e-4, atol=1e-6)
        assert len(layer) == 0 or float(layer.norm()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("scores", [magnitude_scores, gradient_scores])
def test_scoring_leaves_the_model_as_it_was(
    random_model: Models, batches: Batches, scores: Callable[..., list[Tensor]]
) -> None:
    model = random_model(attention_dropout=0.5, projection_dropout=0.5, word_dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = scores(model, batches)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer.output._forward_pre_hooks for layer in model.layers)
    for one, other in zip(first, scores(model, batches), strict=True):
        assert torch.equal(one, other), "no dropout noise in the scores"


def test_a_head_that_does_nothing_is_the_first_to_go(random_model: Models, batches: Batches) -> None:
    model = random_model()
    with torch.no_grad():
        model.layers[1].output.weight[:, 3 * 4 : 4 * 4] = 0
    for scores in (magnitude_scores(model, batches), gradient_scores(model, batches)):
        gates = keep_highest(scores, 23, Scope.all_layers)
        assert [(layer, int(g.argmin())) for layer, g in enumerate(gates) if not g.all()] == [(1, 3)]


def test_random_scores_follow_the_seed() -> None:
    first, again, other = (random_scores([4, 0, 3], generator(seed, "selection")) for seed in (1, 1, 2))
    assert [len(layer) for layer in first] == [4, 0, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    share = torch.cat(random_scores([1000] * 10, generator(1, "selection"))).mean()
    assert float(share) == pytest.approx(0.5, abs=0.02)


class TestKeepHighest:
    scores = (torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.1, 0.5, 0.3]), torch.zeros(0))

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, [[0, 0, 0, 0], [0, 0, 0], []]),
            (3, [[1, 1, 1, 0], [0, 0, 0], []]),
            (5, [[1, 1, 1, 1], [0, 1, 0], []]),
            (7, [[1, 1, 1, 1], [1, 1, 1], []]),
        ],
    )
    def test_over_all_layers(self, keep: int, expected: list[list[int]]) -> None:
        gates = keep_highest(self.scores, keep, Scope.all_layers)
        assert [layer.int().tolist() for layer in gates] == expected

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, [[0, 0, 0, 0], [0, 0, 0], []]),
            (1, [[1, 0, 0, 0], [0, 0, 0], []]),
            (4, [[1, 1, 0, 0], [0, 1, 1], []]),
            (5, [[1, 1, 1, 0], [0, 1, 1], []]),
            (7, [[1, 1, 1, 1], [1, 1, 1], []]),
        ],
    )
    def test_in_each_layer(self, keep: int, expected: list[list[int]]) -> None:
        gates = keep_highest(self.scores, keep, Scope.each_layer)
        assert [layer.int().tolist() for layer in gates] == expected

    def test_equal_scores_still_give_the_number(self) -> None:
        for scope in Scope:
            gates = keep_highest([torch.zeros(4), torch.zeros(4)], 5, scope)
            assert sum(int(layer.sum()) for layer in gates) == 5


def changes(selection: Selection, **more: Any) -> dict[str, Any]:
    return {"gates__selection": selection, "gates__target_sparsity": 0.5, **more}


def selected(model: AllAttentionLM, settings: PruneSettings) -> list[Tensor]:
    """The gates that a run of these settings should decide on."""
    text = evaluation_stream(model.config, prepare(replace(settings.data)), "valid", settings.eval)
    batches = [(segment.inputs, segment.targets) for segment in text]
    return select_heads(model, batches, settings.gates, 4, generator(settings.seed, "selection"))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("selection", OTHERS)
def test_run_removes_the_number_and_fine_tunes(
    runs: Runs,
    dense_run: RunFolder,
    selection: Selection,
    scope: Scope,
) -> None:
    settings = runs.pruning("selected", dense_run.last, **changes(selection, gates__scope=scope))
    folder = runs.run(settings)
    last = read_checkpoint(folder.last)
    kept = last["allattn"]["model"]["heads_kept"]
    assert sum(map(len, kept)) == 4
    if scope is Scope.each_layer:
        assert [len(heads) for heads in kept] == [2, 2]
    assert last["allattn"]["step"] == 10, "schedule.steps, as many as with learned gates"
    assert last["allattn"]["phase"] == Phase.fine_tune.value
    assert last["allattn"]["model"]["output_scale"] == [min(4 / max(len(heads), 1), 4) for heads in kept]
    assert not folder.gates.exists()
    rows = read_metrics(folder.metrics)
    assert {row["phase"] for row in rows} == {"fine_tune"}
    assert len(rows) == 10
    result = folder.finished()
    assert result is not None
    assert result["selection"] == selection.value
    assert result["steps"] == result["updates_after_cut"] == 10
    assert result["tokens_after_cut"] == 10 * 4 * 6
    assert result["pruned"]["heads_kept_total"] == 4
    dense = load_model(dense_run.last).model
    gates = selected(dense, settings)
    assert [layer.nonzero().flatten().tolist() for layer in gates] == kept


@pytest.mark.parametrize("steps", [4, 13], ids=["fewer", "more"])
def test_number_of_updates_may_be_another(runs: Runs, dense_run: RunFolder, steps: int) -> None:
    """The learning rate takes its whole course over them."""
    own = {"gates__selection_steps": steps, "schedule__shape": Shape.cosine, "schedule__final_ratio": 0.5}
    folder = runs.run(runs.pruning("own", dense_run.last, **changes(Selection.magnitude, **own)))
    rates = [float(row["learning_rate"]) for row in read_metrics(folder.metrics)]
    assert len(rates) == steps
    assert (rates[0], rates[-1]) == pytest.approx((0.001, 0.0005))
    result = folder.finished()
    assert result is not None
    assert result["updates_after_cut"] == steps


def test_learned_gates_take_the_steps_of_the_schedule(runs: Runs, dense_run: RunFolder) -> None:
    folder = runs.run(runs.pruning("l0", dense_run.last, gates__selection_steps=3))
    result = folder.finished()
    assert result is not None
    assert (result["steps"], result["updates_after_cut"]) == (10, 5), "the freeze is at step 5"
    assert result["tokens_after_cut"] == 5 * 4 * 6


def test_where_heads_are_removed() -> None:
    places = {
        selection: removal_steps(GatesConfig(freeze_step=5, iterations=3, selection=selection), 10)
        for selection in Selection
    }
    assert places[Selection.l0] == [5]
    assert places[Selection.iterative] == [0, 3, 6]
    assert all(places[selection] == [0] for selection in OTHERS)


def test_each_removal_takes_its_part() -> None:
    """5 of 9 heads go in four parts; the last leaves what a single removal leaves."""
    assert [heads_after(0.56, 9, removal, 4) for removal in (1, 2, 3, 4)] == [8, 7, 5, 4]
    assert heads_after(0.56, 9, 1, 1) == 4
    assert [heads_after(0.0, 9, removal, 2) for removal in (1, 2)] == [9, 9]


def test_iterative_scores_the_trained_model_before_each_removal(
    runs: Runs, dense_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 heads, 4 to go, in three parts: 7 stay from the start, 5 from step 3, 4 from step 6."""
    prune, seen = import_module("allattn.stages.prune"), []

    def select(model: AllAttentionLM, *rest: Any) -> list[Tensor]:
        gates = select_heads(model, *rest)
        seen.append((model.config.heads_kept_total, sum(int(layer.sum()) for layer in gates)))
        folder = runs.at(settings)
        if folder.last.exists():
            trained = load_model(folder.last).model.state_dict()
            assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
        return gates

    monkeypatch.setattr(prune, "select_heads", select)
    settings = runs.pruning("several", dense_run.last, **changes(Selection.iterative, gates__iterations=3))
    folder = runs.run(settings)
    assert seen == [(8, 7), (7, 5), (5, 4)]
    rows = read_metrics(folder.metrics)
    assert [round(8 * (1 - float(row["sparsity"]))) for row in rows] == [7] * 3 + [5] * 3 + [4] * 4
    result = folder.finished()
    assert result is not None
    assert result["pruned"]["heads_kept_total"] == 4
    assert (result["steps"], result["updates_after_cut"], result["tokens_after_cut"]) == (10, 4, 4 * 24)
    meta = read_checkpoint(folder.last)["allattn"]
    assert meta["model"]["output_scale"] == [
        min(4 / max(len(heads), 1), 4) for heads in meta["model"]["heads_kept"]
    ]


def test_iterative_goes_on_in_any_round(
    runs: Runs, dense_run: RunFolder, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in a round and at a removal's step; crashed before the removal is written and after it."""
    several = changes(Selection.iterative, gates__iterations=3)
    whole = runs.run(runs.pruning("whole", dense_run.last, **several))
    stopped = runs.pruning("stopped", dense_run.last, **several)
    for step in (1, 3, 5, 9):
        stop.by_signal(lambda: runs.run(stopped), step)
    assert_same(runs.run(stopped), whole)
    crashed = runs.pruning("crashed", dense_run.last, **several)
    with monkeypatch.context() as patch:
        cuts = iter([cut_checkpoint])
        patch.setattr(import_module("allattn.stages.prune"), "cut_checkpoint", lambda *by: next(cuts)(*by))
        with pytest.raises(StopIteration):
            runs.run(crashed)
    assert read_checkpoint(runs.at(crashed).last)["allattn"]["step"] == 3
    for step in (4, 8):
        stop.by_crash(lambda: runs.run(crashed), step)
    assert_same(runs.run(crashed), whole)


def test_selections_are_not_all_the_same(
    runs: Runs,
    dense_run: RunFolder,
) -> None:
    dense = load_model(dense_run.last).model
    found = set()
    for selection in OTHERS:
        for seed in (1, 2, 3):
            settings = runs.pruning("any", dense_run.last, seed=seed, **changes(selection))
            gates = selected(dense, settings)
            found.add((selection, tuple(torch.cat(gates).int().tolist())))
    assert len([1 for selection, _ in found if selection is Selection.random]) > 1
    assert len([1 for selection, _ in found if selection is not Selection.random]) == 2, "no noise in these"


@pytest.mark.parametrize("selection", OTHERS)
def test_stopped_run_goes_on_with_the_same_heads(
    runs: Runs,
    dense_run: RunFolder,
    stop: Stop,
    selection: Selection,
) -> None:
    whole = runs.run(runs.pruning("whole", dense_run.last, **changes(selection)))
    settings = runs.pruning("stopped", dense_run.last, **changes(selection))
    for step in (1, 3):
        stop.by_signal(lambda: runs.run(settings), step)
    again = runs.run(settings)
    left, right = read_checkpoint(whole.last), read_checkpoint(again.last)
    assert left["allattn"]["model"] == right["allattn"]["model"]
    assert left["global_step"] == right["global_step"] == 10
    assert left["state_dict"].keys() == right["state_dict"].keys()
    for name, tensor in left["state_dict"].items():
        assert torch.equal(tensor, right["state_dict"][name]), name
    rows = [
        [{n: v for n, v in row.items() if n not in MEASURED} for row in read_metrics(folder.metrics)]
        for folder in (whole, again)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("selection", OTHERS)
def test_heads_are_removed_before_the_first_step(
    runs: Runs,
    dense_run: RunFolder,
    selection: Selection,
) -> None:
    """The fine-tuned weights start from the dense ones of the kept heads, not from new ones."""
    settings = runs.pruning(
        "still", dense_run.last, **changes(selection, optimizer__learning_rate=1e-12, eval__interval=0)
    )
    cut = load_model(runs.run(settings).last).model
    dense = load_model(dense_run.last).model
    assert cut.config.heads_kept is not None
    for layer, heads in enumerate(cut.config.heads_kept):
        weight = dense.layers[layer].query.weight.unflatten(0, (4, -1))[heads].flatten(0, 1)
        torch.testing.assert_close(cut.layers[layer].query.weight, weight, rtol=0, atol=1e-6)
