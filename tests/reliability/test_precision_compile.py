"""Mixed precision and torch.compile: near float32's numbers, with the sensitive parts in float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from support.processes import ROOT, numbers, run, start

from allattn.model.cores.inputs import CoreInputs
from allattn.model.cores.plain import attend_plain
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.settings import pretrain_settings, register
from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]
STEPS = 6


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments) -> RunFolder:
    """A run in float32, not compiled, without dropout."""
    base = tmp_path_factory.mktemp("float32")
    folder = RunFolder(base / "run")
    run(base / "output", "train.py", *pretraining(folder, f"schedule.steps={STEPS}", dropout=0.0))
    return folder


def test_bf16_mixed_trains_near_float32(tmp_path: Path, pretraining: Arguments, float32: RunFolder) -> None:
    folder = RunFolder(tmp_path / "run")
    arguments = pretraining(folder, f"schedule.steps={STEPS}", "trainer.precision=bf16-mixed", dropout=0.0)
    run(tmp_path / "output", "train.py", *arguments)
    mixed, plain = numbers(folder, "loss"), numbers(float32, "loss")
    assert mixed[0] == pytest.approx(plain[0], rel=0.02)
    assert mixed != plain, "the precision is used"
    assert mixed == pytest.approx(plain, rel=0.05)


def test_bf16_mixed_pruning(tmp_path: Path, pruning: Arguments, dense: RunFolder) -> None:
    folder = RunFolder(tmp_path / "run")
    run(tmp_path / "output", "prune.py", *pruning(folder, dense.last), "trainer.precision=bf16-mixed")
    losses = numbers(folder, "loss")
    assert len(losses) == 24
    assert all(0 < loss < 10 for loss in losses)
    state = torch.load(folder.gates, weights_only=True)["state_dict"]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize("cutoffs", [[10, 30], []])
def test_losses_gates_and_weights_are_float32_under_autocast(
    random_model: Callable[..., AllAttentionLM], cutoffs: list[int]
) -> None:
    """bfloat16 has steps of 1/64 at 4 nats: a loss that passed through it would be a multiple of them."""
    model = random_model(cutoffs=cutoffs)
    gates = HeadGates(GatesConfig(), [8] * 3, 8, [1.0] * 3)
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []
    layer: Any = model.layers[0]
    hook = layer.query.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        sampled = gates.sample(torch.Generator().manual_seed(0))
        multipliers = gates.multipliers(sampled)
        nats, memory = model(ids[:, :-1], ids[:, 1:], model.empty_memory(2), multipliers)
        (nats.mean() + gates.penalty()).backward()
    hook.remove()
    assert seen == [torch.bfloat16], "autocast was on"
    assert nats.dtype == gates.penalty().dtype == torch.float32
    assert {gate.dtype for gate in [*sampled, *multipliers]} == {torch.float32}
    assert {layer.dtype for layer in memory} == {torch.float32}
    assert not torch.equal(nats, nats.bfloat16().float())
    assert {p.grad.dtype for p in [*model.parameters(), *gates.parameters()] if p.grad is not None} == {
        torch.float32
    }
    probabilities = model.softmax.log_probs(
        model.hidden(ids, model.empty_memory(2))[0], model.embedding
    ).exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 11), rtol=0, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_same_losses(tmp_path: Path, pretraining: Arguments) -> None:
    """One layer and evaluation in training's shapes, as every new shape takes seconds to compile."""
    small = ("schedule.steps=5", "model.layers=1", "eval.rows=4", "eval.segment_length=6")
    plain, compiled = (RunFolder(tmp_path / name) for name in ("plain", "compiled"))
    run(tmp_path / "output", "train.py", *pretraining(plain, *small, dropout=0.0))
    arguments = pretraining(compiled, *small, "trainer.compile=true", dropout=0.0)
    output = run(tmp_path / "output", "train.py", *arguments).output
    for column in ("loss", "valid_loss", "gradient_norm"):
        assert numbers(compiled, column) == pytest.approx(numbers(plain, column), rel=1e-4), column
    assert len(numbers(compiled, "loss")) == 5
    weights, others = (read_checkpoint(folder.last)["state_dict"] for folder in (compiled, plain))
    assert any(not torch.equal(weights[name], others[name]) for name in weights), (
        "other kernels round otherwise"
    )
    assert "recompile_limit" not in output


def test_without_a_compiler_there_is_one_line(tmp_path: Path, pretraining: Arguments) -> None:
    arguments = pretraining(RunFolder(tmp_path / "run"), "trainer.compile=true", "schedule.steps=5")
    nothing = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    started = start(tmp_path / "output", "train.py", *arguments, environment=nothing)
    assert started.wait() == 2, started.output
    assert started.output.splitlines()[-1].startswith("error: trainer.compile=true: the layers cannot be")
    assert "Traceback" not in started.output


def test_the_core_compiles_to_one_graph() -> None:
    """A break would split every layer into pieces that torch.compile cannot fuse."""
    noise = torch.Generator().manual_seed(0)
    batch, queries, keys, heads, width, vectors = 2, 6, 10, 4, 4, 4
    shapes = [
        (batch, queries, heads, width),
        (batch, keys, heads, width),
        (batch, keys, heads, width),
        (keys, heads, width),
        (heads, width),
        (heads, width),
        (vectors, heads, width),
        (vectors, heads, width),
    ]
    inputs = [torch.randn(shape, generator=noise) for shape in shapes]
    explained = torch._dynamo.explain(attend_plain)(CoreInputs(*inputs, window=4, dropout=0.0))
    assert explained.graph_break_count == 0, [reason.reason for reason in explained.break_reasons]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_pruning_gives_the_same_losses(
    tmp_path: Path, pruning: Arguments, pretraining: Arguments
) -> None:
    """Layers of different head counts, with and without gradient, all stay compiled."""
    base = RunFolder(tmp_path / "dense")
    sizes = ("schedule.steps=10", "model.layers=4")
    run(tmp_path / "output", "train.py", *pretraining(base, *sizes, dropout=0.0))
    plain, compiled = (RunFolder(tmp_path / name) for name in ("plain", "compiled"))
    run(tmp_path / "output", "prune.py", *pruning(plain, base.last))
    output = run(
        tmp_path / "output", "prune.py", *pruning(compiled, base.last, "trainer.compile=true")
    ).output
    kept = [json.loads(folder.result.read_text())["pruned"]["heads_kept"] for folder in (plain, compiled)]
    assert kept[0] == kept[1]
    assert len(set(map(len, kept[0]))) > 1, "layers differ"
    assert numbers(compiled, "loss") == pytest.approx(numbers(plain, "loss"), rel=1e-3)
    assert "recompile_limit" not in output, "the rest would have run uncompiled"


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
def test_precisions_are_accepted(precision: str) -> None:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", ["experiment=demo", f"trainer.precision={precision}"])
    with open_dict(config):
        config.pop("hydra", None)
    assert pretrain_settings(config).trainer.precision == precision


def test_an_unknown_precision_is_refused_in_one_line(tmp_path: Path, pretraining: Arguments) -> None:
    folder = RunFolder(tmp_path / "run")
    started = start(tmp_path / "output", "train.py", *pretraining(folder), "trainer.precision=float99")
    assert started.wait() == 2, started.output
    assert "error: trainer.precision=float99" in started.output
    assert "Traceback" not in started.output
