"""Pruning runs on a tiny pretrained model: the same stages, gates and checkpoints as on our own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sameness import assert_same
from support.tiny_networks import saved

from allattn.data.config import DataConfig, Source
from allattn.errors import InputError
from allattn.pretrained import opening
from allattn.pretrained.opening import open_pretrained
from allattn.pruning.config import Removal, Scope, Selection, Trained, Unit
from allattn.settings import PruneSettings
from allattn.training.checkpoints import model_weights, read_checkpoint
from allattn.training.config import EvaluationMode, OptimizerName
from allattn.training.run_folder import RunFolder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def pruning(runs: Any) -> Callable[..., PruneSettings]:
    """Settings of a run of ten steps, five of them with gates, on the tiny text."""

    def made(name: str, folder: Path, **changes: Any) -> PruneSettings:
        window = {"eval__mode": EvaluationMode.window, "eval__context": 8, "eval__stride": 8}
        gates = {"gates__target_sparsity": 1 / 3, "gates__train": Trained.gates}
        adam = {"optimizer__name": OptimizerName.adamw, "optimizer__learning_rate": 0.01}
        settings = runs.pruning(name, f"huggingface:{folder}", **{**window, **gates, **adam, **changes})
        settings.data = replace(settings.data)
        return settings

    return made


def weights(path: Path) -> dict[str, torch.Tensor]:
    return model_weights(read_checkpoint(path)["state_dict"])


def test_a_killed_run_repeats_an_uninterrupted_one(
    runs: Any, pruning: Callable[..., PruneSettings], llama: Path, stop: Any
) -> None:
    """Stopped among the gates, whose weights do not move, and again in the fine-tuning of what is left."""
    whole = runs.run(pruning("whole", llama))
    settings = pruning("parts", llama)
    for step in (3, 7):
        stop.by_crash(lambda: runs.run(settings), step)
    parts = runs.run(settings)
    assert_same(parts, whole)
    before, after = weights(whole.gates), weights(whole.last)
    name = "network.model.embed_tokens.weight"
    assert not torch.equal(before[name], after[name])
    result = whole.finished()
    assert result is not None
    assert (result["dense"]["heads_kept_total"], result["pruned"]["heads_kept_total"]) == (18, 12)
    assert result["unit"] == {"name": "head", "parameters": 192, "cache_bytes_per_token": 0}
    assert result["pruned"]["family"] == "llama"


def test_gates_alone_leave_the_weights_as_they_were(
    runs: Any, pruning: Callable[..., PruneSettings], llama: Path
) -> None:
    folder: RunFolder = runs.run(
        pruning(
            "groups",
            llama,
            gates__unit=Unit.kv_group,
            gates__scope=Scope.each_layer,
            gates__target_sparsity=0.5,
            gates__train_after=Trained.outputs,
            distill__weight=0.5,
        )
    )
    given = open_pretrained(llama).state
    gated, last = weights(folder.gates), weights(folder.last)
    assert all(torch.equal(tensor, given[name]) for name, tensor in gated.items())
    checkpoint = read_checkpoint(folder.last)
    heads = checkpoint["allattn"]["model"]["heads_kept"]
    assert all(layer in ([0, 1, 2], [3, 4, 5]) for layer in heads), "whole groups, as many in each layer"
    assert [len(layer) for layer in checkpoint["allattn"]["pi"]] == [6, 6, 6]
    rows = heads[0][0] * 4
    same = "network.model.layers.0.self_attn.v_proj.weight"
    group = heads[0][0] // 3 * 4
    assert torch.equal(last[same], given[same][group : group + 4]), "not trained after the removal"
    output = "network.model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(last[output], given[output][:, rows : rows + 12])


@pytest.mark.parametrize("selection", [Selection.gradient, Selection.random, Selection.circuit_ahon_ln])
def test_other_selections(
    runs: Any, pruning: Callable[..., PruneSettings], llama: Path, selection: Selection
) -> None:
    settings = pruning(
        "selected", llama, gates__selection=selection, gates__unit=Unit.kv_group, gates__selection_steps=1
    )
    result = runs.run(settings).finished()
    whole_groups = [[], [0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert all(layer in whole_groups for layer in result["pruned"]["heads_kept"])
    assert result["pruned"]["heads_kept_total"] == 12


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention weights": ({"gates__selection": Selection.aeqd}, "llama.* shows no attention weights"),
    "bias": ({"gates__selection": Selection.flap}, "gates.selection=flap.* is for models of allattn"),
    "memory": ({"eval__mode": EvaluationMode.memory}, "carries no memory"),
    "too long": ({"schedule__segment_length": 65}, "reads at most 64 tokens"),
    "no model": ({}, "holds no weights"),
    "nothing named": ({"data": DataConfig(source=Source.checkpoint)}, "names no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_pruned_is_refused_in_one_line(
    runs: Any, pruning: Callable[..., PruneSettings], llama: Path, case: str, tmp_path: Path
) -> None:
    changes, words = REFUSED[case]
    settings = pruning("refused", tmp_path if case == "no model" else llama, **changes)
    with pytest.raises(InputError, match=words) as refused:
        runs.run(settings)
    assert "\n" not in str(refused.value)


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    runs: Any, pruning: Callable[..., PruneSettings], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read")
    )
    with pytest.raises(InputError, match=r"take 0\.0 GiB in float32, but 0\.0 GiB"):
        runs.run(pruning("large", llama))


def test_masked_heads_of_a_joint_norm(
    runs: Any, pruning: Callable[..., PruneSettings], tmp_path: Path
) -> None:
    olmo = saved("olmo2", tmp_path / "olmo2")
    with pytest.raises(InputError, match="olmo2 normalizes"):
        runs.run(pruning("cut", olmo))
    result = runs.run(pruning("masked", olmo, gates__removal=Removal.masked)).finished()
    assert result["pruned"]["heads_kept_total"] == 12
    assert result["pruned"]["parameters"]["total"] == result["dense"]["parameters"]["total"]
