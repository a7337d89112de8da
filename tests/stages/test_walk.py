"""Both stages from text files to result.json, once, with nothing replaced."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allattn import stages
from allattn.commands.evaluate import EvaluateSettings, Split, evaluate
from allattn.data.config import Source
from allattn.model.config import model_config_from_dict
from allattn.record.articles import articles_from_record
from allattn.settings import PruneSettings
from allattn.stages.run import Run
from allattn.training.checkpoints import read_checkpoint
from allattn.training.loading import build_model, load_model
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder

LogProbs = Callable[..., Tensor]
STEPS, FREEZE = 30, 20
EPS = np.finfo(np.float64).eps


@dataclass
class Walk:
    """A finished pruning run whose gates learned from near 0, so that some close and some open."""

    settings: PruneSettings
    folder: RunFolder
    at_freeze: Path  # a copy of last.ckpt right after the removal
    result: dict[str, Any]


@pytest.fixture(scope="module")
def walk(
    runs_below: Callable[[Path], Any], dense_run: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> Walk:
    base = tmp_path_factory.mktemp("walk")
    runs = runs_below(base)
    settings = runs.pruning(
        "pruned",
        dense_run.last,
        gates__initial_pi=0.05,
        gates__learning_rate_ratio=100.0,
        gates__freeze_step=FREEZE,
        schedule__steps=STEPS,
    )
    settings.data = replace(settings.data, source=Source.checkpoint, folder=None)
    go_on, at_freeze = Run.go_on_from, base / "at_freeze.ckpt"

    def copying(self: Run[PruneSettings], cuts: int) -> None:
        go_on(self, cuts)
        at_freeze.write_bytes(self.folder.last.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "go_on_from", copying)
        folder = runs.run(settings)
    return Walk(settings, folder, at_freeze, json.loads(folder.result.read_text()))


def test_some_heads_went_and_some_stayed(walk: Walk) -> None:
    """The other tests of this file would compare little otherwise."""
    dense, pruned = walk.result["dense"], walk.result["pruned"]
    assert dense["heads_kept_total"] == dense["heads_total"] == pruned["heads_total"] == 8
    assert 0 < pruned["heads_kept_total"] < 8
    assert pruned["sparsity"] == pytest.approx(1 - pruned["heads_kept_total"] / 8)
    removed = 8 - pruned["heads_kept_total"]
    gone = dense["parameters"]["layers"] - pruned["parameters"]["layers"]
    assert gone == removed * dense["parameters"]["per_head"]
    assert dense["parameters"]["embedding_side"] == pruned["parameters"]["embedding_side"]


def test_result_is_that_of_the_saved_checkpoints(walk: Walk, dense_run: RunFolder) -> None:
    """Each reported number comes out of `allattn evaluate` again."""
    for name, path in {"dense": dense_run.last, "pruned": walk.folder.last}.items():
        for split in (Split.valid, Split.test):
            found = evaluate(
                EvaluateSettings(
                    checkpoint=str(path), split=split, data=walk.settings.data, eval=walk.settings.eval
                )
            )
            model = walk.result[name]
            assert found == {**model[split.value], "evaluation": model["evaluation"]}
    reported = json.loads(dense_run.result.read_text())["dense"]
    assert walk.result["dense"]["test"] == reported["test"], "the dense model scores as after its training"


def test_dense_runs_time_their_layers_too(walk: Walk, dense_run: RunFolder) -> None:
    reported = json.loads(dense_run.result.read_text())
    for record in (reported["dense"], walk.result["dense"], walk.result["pruned"]):
        assert record["layer_microseconds_per_token"] > 0


@pytest.mark.parametrize(("core", "computed"), [("auto", "recompute"), ("plain", "plain")])
def test_a_run_says_and_records_its_core_and_precision(
    runs: Any, capsys: pytest.CaptureFixture[str], core: str, computed: str
) -> None:
    folder = runs.run(runs.pretraining("run", trainer__core=core, schedule__steps=4))
    assert capsys.readouterr().out.count(f"attention core: {computed}; precision: 32-true\n") == 1
    result = json.loads(folder.result.read_text())
    assert (result["core"], result["precision"]) == (computed, "32-true")


def test_tokens_scored_are_all_after_the_first(walk: Walk) -> None:
    tokens = walk.result["corpus"]["tokens"]
    for model in ("dense", "pruned"):
        for split in ("valid", "test"):
            assert walk.result[model][split]["tokens_scored"] == tokens[split] - 1


def test_nats_by_article_lie_beside_the_result(walk: Walk, dense_run: RunFolder) -> None:
    """They add up to the result's numbers to the last digits of a sum, for every model and split."""
    for folder, models in ((dense_run, ["dense"]), (walk.folder, ["dense", "pruned"])):
        result, kept = (json.loads(path.read_text()) for path in (folder.result, folder.articles))
        assert list(kept) == models
        for name in models:
            assert list(kept[name]) == ["valid", "test"]
            for split, articles in articles_from_record(kept[name]).items():
                record = result[name][split]
                assert articles.tokens.sum() == record["tokens_scored"]
                nats = record["nats_per_token"] * record["tokens_scored"]
                assert articles.nats.sum() == pytest.approx(nats, rel=record["tokens_scored"] * EPS)


def test_the_result_says_how_it_was_scored(walk: Walk) -> None:
    for model in ("dense", "pruned"):
        how = walk.result[model]["evaluation"]
        assert how.pop("device").startswith(("cpu ", "cuda "))
        assert how == {
            "mode": "memory",
            "memory_length": 4,
            "segment_length": walk.settings.eval.segment_length,
            "eos_is_a_word": True,
            "precision": "float32",
            "core": "recompute",
        }


def test_cut_model_is_the_gated_one_at_the_freeze(walk: Walk, log_probs: LogProbs) -> None:
    """Gated logits by hand = load_model(gates.ckpt) = the checkpoint that training went on from."""
    checkpoint = read_checkpoint(walk.folder.gates)
    state = checkpoint["state_dict"]
    config = model_config_from_dict(checkpoint["allattn"]["model"])
    uncut = build_model(config, state, walk.folder.gates).eval()
    gates = [(state[f"gates.pi.{layer}"] > 0).float() for layer in range(2)]
    expected = log_probs(uncut, [4 / g.sum().clamp(min=1) * g for g in gates])
    loaded = load_model(walk.folder.gates).model.eval()
    cut = load_model(walk.at_freeze).model.eval()
    torch.testing.assert_close(log_probs(loaded), expected, rtol=0, atol=1e-5)
    assert torch.equal(log_probs(cut), log_probs(loaded))
    assert not torch.allclose(log_probs(uncut), expected, atol=1e-3)
    assert cut.config.heads_kept == walk.result["pruned"]["heads_kept"]


def test_phases_in_metrics_and_checkpoints(walk: Walk) -> None:
    rows = read_metrics(walk.folder.metrics)
    assert [row["phase"] for row in rows] == ["gates"] * FREEZE + ["fine_tune"] * (STEPS - FREEZE)
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    phases = {
        path.stem: read_checkpoint(path)["allattn"]["phase"] for path in (walk.folder.gates, walk.folder.last)
    }
    assert phases == {"gates": "gates", "last": "fine_tune"}
    before, after = rows[FREEZE - 1], rows[FREEZE]
    assert float(before["sparsity"]) == float(after["sparsity"]) == walk.result["pruned"]["sparsity"]
    for layer, kept in enumerate(walk.result["pruned"]["heads_kept"]):
        assert int(before[f"open_heads/layer_{layer:02d}"]) == len(kept)
        assert float(before[f"s_g/layer_{layer:02d}"]) == pytest.approx(4 / max(len(kept), 1))


def test_validation_in_training_agrees_with_the_result(walk: Walk) -> None:
    last = read_metrics(walk.folder.metrics)[-1]
    assert float(last["valid_perplexity"]) == pytest.approx(walk.result["pruned"]["valid"]["perplexity"])


def test_gated_checkpoint_is_no_start_for_pruning(walk: Walk) -> None:
    with pytest.raises(ValueError, match="from the middle of a pruning run"):
        stages.prune(replace(walk.settings, checkpoint=str(walk.folder.gates), name="again"))
