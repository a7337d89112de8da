"""Sharded weights in two processes: loss curves, gates, scores and checkpoints are those of one process."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import KILLED, PATIENCE, KillIn, forks, numbers, rows, run, start_two, wait_for_both
from support.sameness import equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder
from allattn.training.sharding import is_finite

Arguments = Callable[..., list[str]]
DDP = ("trainer.devices=2", "trainer.strategy=ddp")
FSDP = ("trainer.devices=2", "trainer.strategy=fsdp")
STEP = "allattn.training.language_task:LanguageTask.training_step"
BANDS = "model.cutoffs=[10,25]"
COLUMNS = ("loss", "gradient_norm", "valid_loss")


def run_two(output: Path, script: str, *arguments: str) -> None:
    started = start_two(output, script, *arguments)
    assert wait_for_both(started) == [0, 0], started[0].output + started[1].output


def both(
    base: Path,
    script: str,
    arguments: Callable[[RunFolder], list[str]],
    strategy: tuple[str, ...] = FSDP,
) -> tuple[RunFolder, RunFolder]:
    """The same run in two processes, by default with sharded weights, and in one process."""
    base.mkdir(exist_ok=True)
    two, one = RunFolder(base / "two"), RunFolder(base / "one")
    run_two(base, script, *arguments(two), *strategy)
    run(base / "output", script, *arguments(one))
    return two, one


def assert_same_curve(
    ours: RunFolder, theirs: RunFolder, relative: float, columns: tuple[str, ...] = COLUMNS
) -> None:
    for column in columns:
        expected = numbers(theirs, column)
        assert len(expected) >= 2, column
        assert numbers(ours, column) == pytest.approx(expected, rel=relative), column


def result(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.result.read_text())


def describe(value: Any) -> Any:
    """The structure of a checkpoint's part: types, and shapes and dtypes of tensors."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype
    if isinstance(value, dict):
        return {key: describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    return type(value)


# Muon orthogonalizes in bfloat16, where sums in another order differ more.
@pytest.mark.parametrize(("optimizer", "relative"), [("lamb", 1e-5), ("adamw", 1e-5), ("muon", 2e-4)])
def test_same_curve_and_checkpoint(
    tmp_path: Path, pretraining: Arguments, optimizer: str, relative: float
) -> None:
    """Adaptive bands, decay, clipping, accumulation, and a row of evaluation that one process has alone."""
    changes = (f"optimizer={optimizer}", "optimizer.weight_decay=0.1", "schedule.steps=12", BANDS)
    changes = (*changes, "trainer.accumulation=2", "eval.rows=1", "eval.interval=4")
    sharded, one = both(tmp_path, "train.py", lambda folder: pretraining(folder, *changes, dropout=0.0))
    assert min(numbers(one, "gradient_norm")) > 0.5, "every step was clipped"
    losses = numbers(one, "loss")
    assert min(losses) < losses[0] - 0.05, "the weights moved, so equal losses mean equal updates"
    assert_same_curve(sharded, one, relative)
    ours, theirs = (read_checkpoint(folder.last) for folder in (sharded, one))
    for part in ("state_dict", "optimizer_states"):
        assert describe(ours[part]) == describe(theirs[part])
    groups = [checkpoint["optimizer_states"][0]["param_groups"] for checkpoint in (ours, theirs)]
    assert groups[0] == groups[1]
    for name, tensor in theirs["state_dict"].items():
        difference = float((ours["state_dict"][name] - tensor).norm() / (1e-6 + tensor.norm()))
        assert difference < 100 * relative, name
    for number, entries in theirs["optimizer_states"][0]["state"].items():
        for name, value in entries.items():
            mine = ours["optimizer_states"][0]["state"][number][name]
            assert float((mine - value).norm() / (1e-9 + value.norm())) < 0.05, (number, name)
    assert result(sharded)["dense"]["test"]["perplexity"] == pytest.approx(
        result(one)["dense"]["test"]["perplexity"], rel=10 * relative
    )


@pytest.fixture(scope="module")
def pruned(
    tmp_path_factory: pytest.TempPathFactory, pruning: Arguments, dense_without_dropout: RunFolder
) -> tuple[RunFolder, RunFolder]:
    base = tmp_path_factory.mktemp("pruned")
    return both(base, "prune.py", lambda folder: pruning(folder, dense_without_dropout.last))


def test_pruning_has_the_same_curve_and_heads(pruned: tuple[RunFolder, RunFolder]) -> None:
    sharded, one = pruned
    columns = (*COLUMNS, "loss_total", "penalty", "lambda", "sparsity_sampled", "sparsity")
    assert_same_curve(sharded, one, 1e-4, columns)
    assert len(numbers(sharded, "loss")) == 24
    ours, theirs = (result(folder)["pruned"] for folder in pruned)
    assert ours["heads_kept"] == theirs["heads_kept"]
    assert 0 < theirs["sparsity"] < 1, "some heads were closed and some kept"
    gates, expected = (read_checkpoint(folder.gates)["state_dict"] for folder in pruned)
    for layer in range(2):
        name = f"gates.pi.{layer}"
        assert not torch.allclose(expected[name], torch.tensor(0.1), atol=0.01), "pi moved"
        torch.testing.assert_close(gates[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_learning_from_the_dense_model(
    tmp_path: Path, pretraining: Arguments, pruning: Arguments, strategy: tuple[str, ...]
) -> None:
    """With gates and after them, over bands; stopped in both phases, and the curve of one process."""
    dense = RunFolder(tmp_path / "dense")
    run(tmp_path / "output", "train.py", *pretraining(dense, "schedule.steps=5", BANDS, dropout=0.0))
    taught = ("distill.weight=0.5", "distill.temperature=2", "distill.gates=true")
    two, one = RunFolder(tmp_path / "two"), RunFolder(tmp_path / "one")
    run(tmp_path / "output", "prune.py", *pruning(one, dense.last, *taught))
    arguments = pruning(two, dense.last, *taught, *strategy)
    for step in (8, 8):  # steps of this start, so the 16th of the run in the second
        told = KillIn(STEP, step, number=signal.SIGTERM)
        started = start_two(tmp_path, "prune.py", *arguments, kill_in=(None, told))
        assert wait_for_both(started) == [143, 143], started[0].output + started[1].output
    run_two(tmp_path, "prune.py", *arguments)
    assert len(numbers(two, "divergence")) == 24
    assert_same_curve(two, one, 1e-4, (*COLUMNS, "divergence", "loss_total"))


def test_a_layer_without_heads(tmp_path: Path, pruning: Arguments, dense_without_dropout: RunFolder) -> None:
    """One head of eight is left: a layer has but its bias, and tensors without elements."""
    changes = ("gates.selection=random", "gates.target_sparsity=0.875")
    sharded, one = both(
        tmp_path, "prune.py", lambda folder: pruning(folder, dense_without_dropout.last, *changes)
    )
    assert sorted(map(len, result(one)["pruned"]["heads_kept"])) == [0, 1]
    assert_same_curve(sharded, one, 1e-4)


@pytest.mark.parametrize("strategy", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_a_transformer_xl_down_to_one_head(
    tmp_path: Path, pretraining: Arguments, pruning: Arguments, strategy: tuple[str, ...]
) -> None:
    """No persistent vectors, so tensors without elements; a layer without heads has its feed-forward."""
    sizes = ("model.persistent_vectors=0", "model.feed_forward=9")
    sizes = (*sizes, "model.feed_forward_dropout=0", "schedule.steps=12", "eval.interval=4")
    two, one = both(
        tmp_path / "dense", "train.py", lambda folder: pretraining(folder, *sizes, dropout=0.0), strategy
    )
    assert_same_curve(two, one, 1e-5)
    changes = ("gates.selection=random", "gates.target_sparsity=0.875")
    two, one = both(
        tmp_path / "pruned", "prune.py", lambda folder: pruning(folder, one.last, *changes), strategy
    )
    assert result(one)["pruned"]["family"] == "Transformer-XL"
    assert sorted(map(len, result(one)["pruned"]["heads_kept"])) == [0, 1]
    assert_same_curve(two, one, 1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pruning: Arguments, dense: RunFolder) -> RunFolder:
    """The uninterrupted pruning run with sharded weights, with dropout and gate noise."""
    base = tmp_path_factory.mktemp("whole")
    folder = RunFolder(base / "run")
    run_two(base, "prune.py", *pruning(folder, dense.last, *FSDP))
    return folder


def test_killed_twice_and_stopped_goes_on(
    tmp_path: Path, pruning: Arguments, dense: RunFolder, whole: RunFolder
) -> None:
    """In the gate phase, while a checkpoint is written, and after the freeze; bit-identical numbers."""
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense.last, *FSDP)
    at_step_8 = KillIn(STEP, 8)
    assert wait_for_both(start_two(tmp_path, "prune.py", *arguments, kill_in=(at_step_8, at_step_8))) == [
        KILLED,
        KILLED,
    ]
    assert read_checkpoint(folder.last)["allattn"]["step"] == 5
    half_written = KillIn("allattn.training.checkpoints:torch.save", 1, "middle")
    started = start_two(tmp_path, "prune.py", *arguments, kill_in=(half_written, None))
    assert wait_for_both(started)[0] == KILLED, started[0].output
    assert list(folder.checkpoints.glob("*.partial")), "a file was half written"
    told = KillIn(STEP, 11, number=signal.SIGTERM)  # one of the two, in the fine-tuning
    started = start_two(tmp_path, "prune.py", *arguments, kill_in=(None, told))
    assert wait_for_both(started) == [143, 143], started[0].output + started[1].output
    stopped = read_checkpoint(folder.last)["allattn"]
    assert (stopped["step"], stopped["phase"]) == (16, "fine_tune")
    run_two(tmp_path, "prune.py", *arguments)
    assert rows(folder) == rows(whole)
    for name in ("last", "best", "gates"):
        ours, theirs = (read_checkpoint(getattr(f, name)) for f in (folder, whole))
        for part in ("state_dict", "optimizer_states", "allattn"):
            assert equal(ours[part], theirs[part]), f"{name}: {part}"
    assert not list(folder.path.rglob("*.partial"))


@pytest.mark.parametrize(("began", "ended"), [(DDP, FSDP), (FSDP, DDP)], ids=["ddp-fsdp", "fsdp-ddp"])
def test_goes_on_with_the_other_strategy(
    tmp_path: Path,
    pruning: Arguments,
    dense_without_dropout: RunFolder,
    pruned: tuple[RunFolder, RunFolder],
    began: tuple[str, ...],
    ended: tuple[str, ...],
) -> None:
    """A run's checkpoint does not depend on how its weights lay; the change has to be asked for."""
    folder = RunFolder(tmp_path / "run")
    arguments = pruning(folder, dense_without_dropout.last)
    started = start_two(
        tmp_path, "prune.py", *arguments, *began,
        kill_in=(KillIn(STEP, 8), None),
    )  # fmt: skip
    assert wait_for_both(started)[0] == KILLED
    run_two(tmp_path, "prune.py", *arguments, *ended, "resume=changed")
    assert_same_curve(folder, pruned[1], 1e-4)


def judge(rank: int, file: Path, answers: Any) -> None:
    """Say whether a sharded weight is finite, and one with a NaN that the second process holds."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for last in (0.0, float("nan")):
        weight = torch.tensor([[0.0], [0.0], [0.0], [last]])
        part = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        answers.put((rank, last == 0.0, is_finite(part)))
    dist.destroy_process_group()


def test_both_processes_see_a_weight_that_is_not_finite(tmp_path: Path) -> None:
    """Else one would stop and the other wait for it."""
    answers = forks.Queue()
    for rank in range(2):
        forks.Process(target=judge, args=(rank, tmp_path / "meeting", answers)).start()
    given = [answers.get(timeout=PATIENCE) for _ in range(4)]
    assert sorted(rank for rank, _, _ in given) == [0, 0, 1, 1]
    assert all(answer == wanted for _, wanted, answer in given)
