"""Optimizer steps, not micro-batches, drive lambda, the learning rate and the freeze; the freeze holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig
from allattn.pruning.objective import learned_gates
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig
from allattn.training.language_task import LanguageTask
from allattn.training.run_folder import RunFolder

Rows = Callable[[RunFolder], list[dict[str, str]]]
NO_DROPOUT = {
    f"model__{name}_dropout": 0.0 for name in ("attention", "projection", "input", "output", "word")
}
ACCUMULATIONS = (1, 2, 4)


@pytest.fixture
def dense(runs: Any) -> RunFolder:
    """A dense run without dropout."""
    return runs.run(runs.pretraining("dense", schedule__steps=4, **NO_DROPOUT))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]


def test_accumulation_does_not_change_pretraining(runs: Any, rows: Rows) -> None:
    found = [
        rows(runs.run(runs.pretraining(f"by{n}", trainer__accumulation=n, **NO_DROPOUT)))
        for n in ACCUMULATIONS
    ]
    for other in found[1:]:
        assert column(other, "loss") == pytest.approx(column(found[0], "loss"), rel=1e-5)
        assert column(other, "valid_loss") == pytest.approx(column(found[0], "valid_loss"), rel=1e-5)
        for exact in ("step", "learning_rate", "tokens_seen"):
            assert column(other, exact) == column(found[0], exact)


@pytest.mark.usefixtures("uneven_gates")
def test_lambda_and_freeze_count_optimizer_steps(runs: Any, rows: Rows, dense: RunFolder) -> None:
    """Warm-up over 8 and freeze at 16: lambda of the 5th update is 4/8 of full for any accumulation."""
    found = []
    for accumulation in ACCUMULATIONS:
        settings = runs.pruning(
            f"by{accumulation}",
            dense.last,
            trainer__accumulation=accumulation,
            schedule__steps=18,
            gates__lambda_max=0.8,
            gates__lambda_warmup_steps=8,
            gates__freeze_step=16,
        )
        folder = runs.run(settings)
        assert read_checkpoint(folder.gates)["allattn"]["step"] == 16
        found.append(rows(folder))
    expected = [0.8 * step / 8 for step in range(8)] + [0.8] * 8 + [0.0] * 2  # nothing after the freeze
    for run in found:
        assert [row["phase"] for row in run] == ["gates"] * 16 + ["fine_tune"] * 2
        assert column(run, "lambda") == pytest.approx(expected)
        assert column(run, "loss") == pytest.approx(column(found[0], "loss"), rel=1e-4)
        assert column(run, "sparsity_sampled") == column(found[0], "sparsity_sampled"), "the same gates"


def test_penalty_gradient_is_counted_once_for_all_micro_batches(
    random_model: Callable[..., AllAttentionLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning divides each micro-batch's loss by their number."""
    schedule = ScheduleConfig(batch_size=4, segment_length=6)
    ids = torch.arange(28).view(4, 7)
    gates = GatesConfig(lambda_max=0.5, lambda_warmup_steps=0)
    found: list[Tensor] = []
    for accumulation in (1, 4):
        model = random_model(torch.float64)
        objective = learned_gates(gates, model.config, 1)
        task = LanguageTask(model, objective, OptimizerConfig(), schedule, 1, accumulation).double()
        for group, rows in enumerate(ids.chunk(accumulation)):
            batch = Segment(rows[:, :-1], rows[:, 1:], group, True)
            (task.training_step(batch, group) / accumulation).backward()
        found.append(torch.cat([pi.grad for pi in task.gates.pi if pi.grad is not None]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_after_the_freeze_heads_are_fixed_and_weights_move(
    runs: Any, stop: Any, rows: Rows, dense_run: RunFolder, uneven_gates: list[list[int]], name: OptimizerName
) -> None:
    """With weight decay, 10 steps beyond the freeze, and after a stop across it."""
    settings = runs.pruning(
        "frozen", dense_run.last, optimizer__name=name, optimizer__weight_decay=0.1, schedule__steps=15
    )
    stop.by_signal(lambda: runs.run(settings), 5)
    stop.by_signal(lambda: runs.run(settings), 6)
    folder = runs.at(settings)
    early = read_checkpoint(folder.last)
    runs.run(settings)
    gated, late = read_checkpoint(folder.gates), read_checkpoint(folder.last)
    pi = ["gates.pi.0", "gates.pi.1"]
    assert [(gated["state_dict"][name] > 0).nonzero().flatten().tolist() for name in pi] == uneven_gates
    for checkpoint in (early, late):
        assert not [name for name in checkpoint["state_dict"] if name.startswith("gates.")]
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        assert "gates" not in [group["name"] for group in groups]
        assert checkpoint["allattn"]["model"]["heads_kept"] == uneven_gates
        assert checkpoint["allattn"]["model"]["output_scale"] == pytest.approx([4 / 3, 4])
    moved = [
        name
        for name, before in early["state_dict"].items()
        if not torch.equal(before, late["state_dict"][name])
    ]
    assert set(moved) == set(early["state_dict"]), "every weight still moves"
    for row in rows(folder)[5:]:
        assert row["phase"] == "fine_tune"
        assert not row.keys() & {"sparsity_sampled", "learning_rate_gates"}
        assert (float(row["lambda"]), float(row["penalty"])) == (0, 0)
        assert row["loss_total"] == row["loss"]
        assert [row[f"open_heads/layer_0{n}"] for n in (0, 1)] == [str(len(kept)) for kept in uneven_gates]
        assert [float(row[f"s_g/layer_0{n}"]) for n in (0, 1)] == pytest.approx([4 / 3, 4])
        assert float(row["sparsity"]) == 0.5


def test_penalty_is_part_of_the_loss_before_the_freeze(runs: Any, rows: Rows, dense_run: RunFolder) -> None:
    for row in rows(runs.run(runs.pruning("gates", dense_run.last)))[:5]:
        total = float(row["loss"]) + float(row["lambda"]) * float(row["penalty"])
        assert float(row["loss_total"]) == pytest.approx(total, rel=1e-6)
        assert float(row["learning_rate_gates"]) == pytest.approx(2 * float(row["learning_rate"]))


@pytest.mark.parametrize(
    "initial_pi",
    [
        pytest.param(-1.0, id="every head goes"),
        pytest.param(3.0, id="every head stays"),
    ],
)
def test_freeze_at_the_extremes(runs: Any, dense_run: RunFolder, initial_pi: float) -> None:
    settings = runs.pruning("extreme", dense_run.last, gates__initial_pi=initial_pi)
    folder = runs.run(settings)
    kept = [list(range(4))] * 2 if initial_pi > 0 else [[], []]
    assert read_checkpoint(folder.last)["allattn"]["model"]["heads_kept"] == kept


def test_freeze_in_the_last_step(runs: Any, dense_run: RunFolder, uneven_gates: list[list[int]]) -> None:
    folder = runs.run(runs.pruning("last", dense_run.last, gates__freeze_step=10))
    assert read_checkpoint(folder.last)["allattn"]["model"]["heads_kept"] == uneven_gates


def test_pruning_a_pruned_model(runs: Any, dense_run: RunFolder, uneven_gates: list[list[int]]) -> None:
    """A second run starts from the cut model and removes more, under the original numbers."""
    first = runs.run(runs.pruning("first", dense_run.last))
    uneven_gates[:] = [[0, 2], [0]]  # by place among the heads present
    second = runs.run(runs.pruning("second", first.last))
    assert read_checkpoint(second.last)["allattn"]["model"]["heads_kept"] == [[0, 3], [1]]
    result = second.finished()
    assert result is not None
    assert result["dense"]["heads_kept"] == [[0, 2, 3], [1]]
    assert result["pruned"]["heads_kept"] == [[0, 3], [1]]


def test_every_step_draws_new_gates(runs: Any, rows: Rows, dense_run: RunFolder) -> None:
    """pi hardly moves here, so only the noise can change the share of closed gates."""
    settings = runs.pruning(
        "noise", dense_run.last, gates__initial_pi=0.0, gates__freeze_step=10, gates__learning_rate_ratio=1e-6
    )
    assert len(set(column(rows(runs.run(settings)), "sparsity_sampled"))) > 2
