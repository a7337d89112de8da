"""A target sparsity instead of a lambda: the controller, the settling at the freeze, and whole tiny runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.run_fixtures import MEASURED, Runs, Stop
from torch import Tensor

from allattn.commands.evaluate import EvaluateSettings, Split, evaluate
from allattn.model.config import ModelConfig
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import decide_gates, heads_to_keep, settle_gates
from allattn.pruning.objective import TargetGates, target_at
from allattn.training.checkpoints import gate_parameters, read_checkpoint
from allattn.training.config import OptimizerConfig, OptimizerName
from allattn.training.cutting import freeze_plan
from allattn.training.metrics import read_metrics
from allattn.training.optimizers import make_optimizer
from allattn.training.run_folder import RunFolder

TOTAL = 8  # heads of the dense run, 2 layers of 4
TARGETS = (0.25, 0.438, 0.6)
FREEZE = 150
# Gates must have time to go where the controller wants them.
LONG = {
    "schedule__steps": FREEZE + 10,
    "gates__freeze_step": FREEZE,
    "gates__lambda_warmup_steps": 30,
    "gates__lambda_max": 0.5,
    "gates__learning_rate_ratio": 50.0,
    "optimizer__name": OptimizerName.adamw,
    "optimizer__learning_rate": 0.002,
    "eval__interval": 0,
    "trainer__checkpoint_interval": 1000,
}


def gates_at(*pi: list[float], **settings: Any) -> TargetGates:
    config = GatesConfig(**{"target_sparsity": 0.5, "lambda_warmup_steps": 0, **settings})
    heads = [list(range(len(layer))) for layer in pi]
    gates = TargetGates(config, ModelConfig(layers=len(pi), heads=len(pi[0]), heads_kept=heads), 1)
    with torch.no_grad():
        for parameter, values in zip(gates.pi, pi, strict=True):
            parameter.copy_(torch.tensor(values))
    return gates


@pytest.mark.parametrize(
    ("target", "heads", "kept"),
    [(0.438, 128, 72), (0.25, 8, 6), (0.438, 8, 4), (0.6, 8, 3), (0.0, 8, 8), (0.99, 8, 0)],
)
def test_heads_to_keep(target: float, heads: int, kept: int) -> None:
    assert heads_to_keep(target, heads) == kept


@pytest.mark.parametrize("heads", range(100, 300, 7))
def test_target_is_reached_to_within_one_head_per_hundred(heads: int) -> None:
    for target in TARGETS:
        assert abs(1 - heads_to_keep(target, heads) / heads - target) <= 0.01


def test_target_rises_like_lambda() -> None:
    config = GatesConfig(target_sparsity=0.4, lambda_warmup_steps=100, freeze_step=200)
    start = 0.1192029  # sigmoid(-2): what the gates' initialization closes by itself
    assert [target_at(config, step) for step in (0, 50, 99, 100, 199)] == pytest.approx(
        [start, (start + 0.4) / 2, start + 0.99 * (0.4 - start), 0.4, 0.4], rel=1e-6
    )
    no_warmup = GatesConfig(target_sparsity=0.4, lambda_warmup_steps=0)
    assert target_at(no_warmup, 0) == 0.4


class TestSettling:
    """settle_gates: exactly as many open gates as wanted, and only the undecided ones change."""

    def test_gates_that_fit_stay_as_they_are(self) -> None:
        pi = [torch.tensor([1.0, -1.0]), torch.tensor([0.1, -0.1, 2.0])]
        for settled, layer in zip(settle_gates(pi, 3), pi, strict=True):
            assert torch.equal(settled, decide_gates([layer], None)[0])

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (1, [[0, 0, 0], [1, 0]]),
            (2, [[1, 0, 0], [1, 0]]),
            (3, [[1, 0, 1], [1, 0]]),
            (4, [[1, 0, 1], [1, 1]]),
            (0, [[0, 0, 0], [0, 0]]),
            (5, [[1, 1, 1], [1, 1]]),
        ],
    )
    def test_gates_nearest_to_zero_change(self, keep: int, expected: list[list[int]]) -> None:
        pi = [torch.tensor([1.0, -3.0, 0.1]), torch.tensor([2.0, -0.2])]
        assert [gates.int().tolist() for gates in settle_gates(pi, keep)] == expected

    @given(
        values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=24, unique=True),
        share=st.floats(0, 1),
    )
    def test_only_as_many_as_needed_change_and_nearer_ones_first(
        self, values: list[float], share: float
    ) -> None:
        pi = torch.tensor(values)
        keep = round(share * len(values))
        (settled,) = settle_gates([pi], keep)
        assert int(settled.sum()) == keep
        (before,) = decide_gates([pi], None)
        changed = settled != before
        assert int(changed.sum()) == abs(keep - int(before.sum()))
        same_side = before == (1.0 if keep < int(before.sum()) else 0.0)
        if changed.any() and (same_side & ~changed).any():
            assert pi[changed].abs().max() <= pi[same_side & ~changed].abs().min()


class TestController:
    """lambda follows the missing sparsity; no sign, limit or rate is taken on trust."""

    def test_lambda_answers_to_the_missing_sparsity(self) -> None:
        gates = gates_at([0.0, 0.0], lambda_max=0.1, target_gain=5.0)  # expected sparsity 0.5
        assert float(gates.expected_sparsity()) == pytest.approx(0.5)
        for target, missing in ((0.7, 0.2), (0.2, -0.3), (0.5, 0.0)):
            gates.config.target_sparsity = target
            assert float(gates.weight(0)) == pytest.approx(0.1 * 5 * missing, abs=1e-7)

    def test_expected_sparsity_is_over_all_heads(self) -> None:
        gates = gates_at([30.0, 30.0, 30.0], [-30.0], [])
        assert float(gates.expected_sparsity()) == pytest.approx(0.25)

    def test_without_lambda_warm_up_the_whole_target_counts_from_the_first_step(self) -> None:
        """With it target and multiplier rise from nothing missing and from 0."""
        missing = 0.438 - 0.1192029  # less what pi = 2 closes by itself
        for steps, first in ((50, 0.0), (0, 0.1 * 5 * missing)):
            gates = gates_at([2.0] * 4, lambda_max=0.1, lambda_warmup_steps=steps, target_sparsity=0.438)
            assert float(gates.weight(0)) == pytest.approx(first, abs=1e-6)
            gates.end_step(0)
            assert float(gates.lagrange) == pytest.approx(first * 2 / 16_000, abs=1e-8)

    def test_multiplier_integrates_what_is_missing(self) -> None:
        gates = gates_at([0.0, 0.0], lambda_max=0.1, target_gain=5.0, freeze_step=100, target_sparsity=0.7)
        gates.end_step(0)
        assert float(gates.lagrange) == pytest.approx(0.1 * 2 * 5 / 100 * 0.2)
        before = float(gates.weight(1))
        gates.end_step(1)
        assert float(gates.weight(2)) > before, "it grows while sparsity is missing"
        gates.config.target_sparsity = 0.1
        for step in range(5):
            gates.end_step(step)
        assert float(gates.lagrange) < 0, "and falls when there is too much"
        assert gates.lagrange.requires_grad is False

    def test_penalty_with_the_controlled_lambda_moves_sparsity_towards_the_target(self) -> None:
        for target in (0.1, 0.5, 0.9):
            gates = gates_at([0.5, -0.5, 1.0, -1.0], lambda_max=1.0, target_sparsity=target, freeze_step=300)
            optimizer = torch.optim.SGD(gates.parameters(), lr=0.5)
            first = float(gates.expected_sparsity())
            for step in range(300):
                optimizer.zero_grad()
                (gates.weight(step) * gates.penalty()).backward()
                gates.end_step(step)
                optimizer.step()
            assert abs(float(gates.expected_sparsity()) - target) < 0.05
            assert target == 0.5 or abs(first - target) > 0.3


def test_lamb_can_close_gates_that_are_all_alike() -> None:
    gates = gates_at([2.0] * 8, [2.0] * 8, freeze_step=400, target_sparsity=0.6)
    group = {"name": "gates", "params": list(gates.pi), "weight_decay": 0.0}
    optimizer = make_optimizer([group], OptimizerConfig(OptimizerName.lamb, 0.02))
    for step in range(400):
        optimizer.zero_grad()
        (gates.weight(step) * gates.penalty()).backward()
        gates.end_step(step)
        optimizer.step()
    assert float(gates.expected_sparsity()) == pytest.approx(0.6, abs=0.05)


def test_one_decision_for_scoring_metrics_and_removal() -> None:
    """pi > 0 for two gates, three are kept: all who ask hear of the same three."""
    gates = gates_at([0.1, 0.1, -1.0, -1.0], target_sparsity=0.25)
    assert [layer.tolist() for layer in gates.decide()] == [[1, 1, 1, 0]]
    assert [layer.tolist() for layer in gates.decided_multipliers()] == [
        pytest.approx([4 / 3, 4 / 3, 4 / 3, 0])
    ]
    row = gates.metrics(0.1) | gates.scoring_metrics()
    assert (row["open_heads/layer_00"], row["sparsity"], row["valid_heads"]) == (3, 0.25, "0 1 2")
    state = {f"gates.{name}": tensor for name, tensor in gates.state_dict().items()}
    meta = {"model": gates.model.to_dict(), **gates.record()}
    plan = freeze_plan({"state_dict": state, "allattn": meta})
    assert plan.after.kept(0) == [0, 1, 2]
    assert plan.after.scale(0) == pytest.approx(4 / 3)


def test_row_at_the_freeze_is_of_the_heads_that_stay(runs: Runs, dense_run: RunFolder) -> None:
    """Every gate starts open and hardly moves, so 1[pi > 0] would have scored all eight heads."""
    settings = runs.pruning(
        "freeze", dense_run.last, gates__target_sparsity=0.375, gates__learning_rate_ratio=1e-6
    )
    folder = runs.run(settings)
    rows = read_metrics(folder.metrics)
    kept = read_checkpoint(folder.last)["allattn"]["model"]["heads_kept"]
    assert sum(map(len, kept)) == 5
    assert rows[4]["valid_heads"] == " | ".join(" ".join(map(str, layer)) or "none" for layer in kept)
    assert float(rows[4]["sparsity"]) == float(rows[5]["sparsity"]) == 0.375
    text = replace(runs.data)
    found = evaluate(EvaluateSettings(str(folder.gates), split=Split.valid, data=text, eval=settings.eval))
    assert float(rows[4]["valid_loss"]) == pytest.approx(found["nats_per_token"], rel=1e-5)


def expected_sparsity(checkpoint: dict[str, Any]) -> float:
    pi = torch.cat(gate_parameters(checkpoint))
    return 1 - float(torch.sigmoid(pi).mean())


@pytest.fixture(scope="module")
def controlled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[float, RunFolder]:
    """A finished run at each target."""
    below = request.getfixturevalue("runs_below")
    source: RunFolder = request.getfixturevalue("dense_run")
    own = below(tmp_path_factory.mktemp("controlled"))
    return {
        target: own.run(own.pruning(f"target{target}", source.last, gates__target_sparsity=target, **LONG))
        for target in TARGETS
    }


@pytest.mark.parametrize("target", TARGETS)
def test_run_removes_the_targets_number_of_heads_at_the_freeze(
    controlled: dict[float, RunFolder], target: float
) -> None:
    folder = controlled[target]
    kept = TOTAL - round(target * TOTAL)
    gated, last = read_checkpoint(folder.gates), read_checkpoint(folder.last)
    assert gated["allattn"]["step"] == FREEZE
    heads = last["allattn"]["model"]["heads_kept"]
    assert sum(map(len, heads)) == kept
    assert freeze_plan(gated).keep == heads
    result = folder.finished()
    assert result is not None
    assert result["pruned"]["heads_kept_total"] == kept
    assert result["target_sparsity"] == target
    after = [float(row["sparsity"]) for row in read_metrics(folder.metrics) if int(row["step"]) > FREEZE]
    assert after == pytest.approx([1 - kept / TOTAL] * 10)


@pytest.mark.parametrize("target", TARGETS)
def test_controller_brings_the_expected_sparsity_to_the_target(
    controlled: dict[float, RunFolder], target: float
) -> None:
    """The gates themselves, not only the settling, go there from sigmoid(-2) = 0.12."""
    found = expected_sparsity(read_checkpoint(controlled[target].gates))
    assert found == pytest.approx(target, abs=0.07)


def test_lambda_starts_at_the_controllers_value_and_differs_between_targets(
    controlled: dict[float, RunFolder],
) -> None:
    columns = {
        target: [float(row["lambda"]) for row in read_metrics(folder.metrics) if row["phase"] == "gates"]
        for target, folder in controlled.items()
    }
    for values in columns.values():
        assert len(values) == FREEZE
        assert values[0] == pytest.approx(0, abs=1e-5), "nothing is missing at step 0"
    assert max(columns[0.25]) < max(columns[0.438]) < max(columns[0.6])


def test_target_of_nothing_keeps_every_head(
    runs: Runs,
    dense_run: RunFolder,
) -> None:
    folder = runs.run(runs.pruning("nothing", dense_run.last, **{**LONG, "gates__target_sparsity": 0.0}))
    result = folder.finished()
    assert result is not None
    assert result["pruned"]["heads_kept_total"] == TOTAL


def test_finished_run_still_knows_pi(controlled: dict[float, RunFolder]) -> None:
    folder = controlled[0.438]
    last = read_checkpoint(folder.last)["allattn"]
    assert last["pi"] == [layer.tolist() for layer in gate_parameters(read_checkpoint(folder.gates))]
    assert last["heads_before"] == [[0, 1, 2, 3]] * 2


def comparable(path: Path) -> dict[str, Any]:
    checkpoint = read_checkpoint(path)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "global_step", "allattn")}


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list | tuple):
            yield from flat(inner, f"{at}.{key}")
        else:
            yield f"{at}.{key}", inner


def assert_same(left: Path, right: Path) -> None:
    first, second = dict(flat(comparable(left))), dict(flat(comparable(right)))
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, second[name]), name
        else:
            assert value == second[name], name


def measured_apart(folder: RunFolder) -> list[dict[str, str]]:
    rows = read_metrics(folder.metrics)
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


def test_resumed_run_repeats_the_whole_one(
    runs: Runs,
    dense_run: RunFolder,
    stop: Stop,
) -> None:
    """Stopped in the gate phase and at the freeze; the controller's integral is part of the state."""
    changes = {"gates__target_sparsity": 0.438}
    whole = runs.run(runs.pruning("whole", dense_run.last, **changes))
    assert "gates.lagrange" in read_checkpoint(whole.gates)["state_dict"]
    assert float(read_checkpoint(whole.gates)["state_dict"]["gates.lagrange"]) != 0
    settings = runs.pruning("stopped", dense_run.last, **changes)
    stop.by_signal(lambda: runs.run(settings), 3)
    middle = read_checkpoint(runs.at(settings).last)
    assert float(middle["state_dict"]["gates.lagrange"]) != 0
    stop.by_signal(lambda: runs.run(settings), 5)
    again = runs.run(settings)
    assert_same(whole.gates, again.gates)
    assert_same(whole.last, again.last)
    assert measured_apart(whole) == measured_apart(again)


def test_accumulation_does_not_change_the_controller(
    runs: Runs,
    dense_run: RunFolder,
) -> None:
    """One step of the multiplier per optimizer step, whatever the micro-batches."""
    found = []
    for accumulation in (1, 2):
        settings = runs.pruning(
            f"accumulation{accumulation}",
            dense_run.last,
            gates__target_sparsity=0.438,
            gates__lambda_max=1e-6,  # the gates go the same way, whatever the dropout
            gates__learning_rate_ratio=1e-6,
            trainer__accumulation=accumulation,
        )
        found.append(float(read_checkpoint(runs.run(settings).gates)["state_dict"]["gates.lagrange"]))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] != 0
