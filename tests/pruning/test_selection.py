"""Heads chosen without gates: what a selection makes of its score, and whole tiny runs."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from support.run_fixtures import MEASURED, Runs, Stop
from support.sameness import assert_same
from torch import Tensor

from allattn.data.corpus import prepare
from allattn.data.segments import EvaluationStream
from allattn.errors import InputError
from allattn.heads.all_attention import OwnModel
from allattn.heads.ranking import Scope
from allattn.heads.scores import SCORES
from allattn.heads.watched import Batch, Visitor
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig, Selection, check_gates, removal_steps
from allattn.pruning.phase import Phase
from allattn.pruning.selection import heads_after, select_heads
from allattn.randomness import generator
from allattn.settings import PruneSettings
from allattn.training.batches import as_batches
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import Shape
from allattn.training.cutting import cut_checkpoint
from allattn.training.loading import load_model
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import evaluation_stream

OTHERS = [Selection.random, Selection.magnitude, Selection.gradient]


def changes(selection: Selection, **more: Any) -> dict[str, Any]:
    return {"gates__selection": selection, "gates__target_sparsity": 0.5, **more}


def selected(model: AllAttentionLM, settings: PruneSettings) -> list[Tensor]:
    """The gates that a run of these settings should decide on."""
    text = evaluation_stream(model.config, prepare(replace(settings.data)), "valid", settings.eval)
    return select_heads(model, as_batches(text), settings.gates, 4, generator(settings.seed, "selection"))


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


def test_every_score_is_a_selection() -> None:
    """Those of the first token are refused: a segment that carries a memory has none."""
    for name, score in SCORES.items():
        gates = GatesConfig(selection=Selection(name), target_sparsity=0.5)
        if score.needs_no_memory:
            with pytest.raises(InputError, match=rf"gates\.selection={name} is about the first token"):
                check_gates(gates, 20_000)
        else:
            check_gates(gates, 20_000)
    assert {s.value for s in Selection} - SCORES.keys() == {"l0", "iterative"}


def test_selection_by_a_score_of_sequences(runs: Runs, dense_run: RunFolder) -> None:
    """The heads of the highest mean over the segments of the validation text stay; filler does not count."""
    dense = load_model(dense_run.last).model
    settings = runs.pruning("any", dense_run.last, eval__rows=3, **changes(Selection.ahon_ln))
    text = evaluation_stream(dense.config, prepare(replace(settings.data)), "valid", settings.eval)
    assert isinstance(text, EvaluationStream)
    totals, sequences, memory = [torch.zeros(4), torch.zeros(4)], 0, None
    lengths: list[int] = []

    class Norms(Visitor):
        def z(self, layer: int, z: Tensor) -> None:
            for row, length in enumerate(lengths):
                if length > 0:
                    norms = z[row, :length].norm(dim=-1).mean(0)
                    totals[layer] += norms / norms.mean()

    own = OwnModel(dense)
    for segment in text:
        assert segment.first is not None
        width = segment.inputs.shape[1]
        lengths[:] = [min(width, row.end - int(at)) for row, at in zip(text.rows, segment.first, strict=True)]
        sequences += sum(length > 0 for length in lengths)
        everything = torch.ones_like(segment.inputs, dtype=torch.bool)
        with torch.no_grad(), own.watch(Norms()):
            _, memory = own.nats(Batch(segment.inputs, segment.targets, everything), memory)
    assert min(lengths) < width, "a row ends early"
    lowest = (torch.cat(totals) / sequences).sort().indices[:4].tolist()
    gates = selected(dense, settings)
    assert (torch.cat(gates) == 0).nonzero().flatten().tolist() == sorted(lowest)


@pytest.mark.parametrize("output_scaling", [True, False])
def test_flap_compensates_in_the_bias(runs: Runs, dense_run: RunFolder, output_scaling: bool) -> None:
    """What the heads that go wrote on average over the validation text; training itself hardly moves it."""
    still = {"optimizer__learning_rate": 1e-12, "gates__output_scaling": output_scaling, "eval__interval": 0}
    settings = runs.pruning("flap", dense_run.last, **changes(Selection.flap, **still))
    cut = load_model(runs.run(settings).last).model
    dense = load_model(dense_run.last).model
    gates = selected(dense, settings)
    text = evaluation_stream(dense.config, prepare(replace(settings.data)), "valid", settings.eval)
    own, memory = OwnModel(dense), None
    zs: list[list[Tensor]] = [[], []]
    counted: list[Tensor] = []

    class Keeping(Visitor):
        def z(self, layer: int, z: Tensor) -> None:
            zs[layer].append(z.flatten(0, 1)[counted[-1]])

    for segment in text:
        counted.append(segment.targets.flatten() >= 0)
        everything = torch.ones_like(segment.inputs, dtype=torch.bool)
        with torch.no_grad(), own.watch(Keeping()):
            _, memory = own.nats(Batch(segment.inputs, segment.targets, everything), memory)
    for layer, gate in enumerate(gates):
        assert cut.config.kept(layer) == gate.nonzero().flatten().tolist()
        assert cut.config.scale(layer) == (4 / max(int(gate.sum()), 1) if output_scaling else 1)
        z = torch.cat(zs[layer]).double().mean(0)  # (h, c)
        written = torch.einsum("hc,hcd->hd", z, own.layers[layer].output_blocks().double())
        expected = dense.layers[layer].bias.double() + written[gate == 0].sum(0)
        torch.testing.assert_close(cut.layers[layer].bias.double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(cut.layers[layer].bias, dense.layers[layer].bias) or gate.all()


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
