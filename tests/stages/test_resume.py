"""An interrupted run that goes on is bit for bit the uninterrupted one, dropout and gate noise included."""

import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.training import runner
from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import Score
from allattn.training.signals import STOPS, hand_on

Rows = Callable[[RunFolder], list[dict[str, str]]]
# Lightning's own bookkeeping of batches; an uninterrupted run counts it otherwise than a resumed one.
COMPARED = ("state_dict", "optimizer_states", "global_step", "allattn")

TRANSFORMER_XL = {"model__persistent_vectors": 0, "model__feed_forward": 6}


def assert_same(left: Any, right: Any, at: str = "") -> None:
    """Bitwise equality of nested plain values and tensors."""
    assert type(left) is type(right), at
    if isinstance(left, dict):
        assert left.keys() == right.keys(), at
        for key in left:
            assert_same(left[key], right[key], f"{at}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), at
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{at}.{index}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), at
    else:
        assert left == right, at


def assert_same_checkpoints(left: Path, right: Path) -> None:
    first, second = read_checkpoint(left), read_checkpoint(right)
    for entry in COMPARED:
        assert_same(first[entry], second[entry], entry)


def assert_same_runs(left: RunFolder, right: RunFolder, rows: Rows, checkpoints: tuple[str, ...]) -> None:
    assert rows(left) == rows(right)
    for name in checkpoints:
        assert_same_checkpoints(left.checkpoints / name, right.checkpoints / name)


@pytest.fixture
def whole(runs: Any) -> RunFolder:
    """The uninterrupted dense run with two accumulation groups."""
    return runs.run(runs.pretraining("whole", trainer__accumulation=2))


def test_runs_depend_on_dropout_and_seed(runs: Any, rows: Rows) -> None:
    """Otherwise the tests below would compare less than they claim."""
    losses = [
        [row["loss"] for row in rows(runs.run(runs.pretraining(name, **changes)))]
        for name, changes in {
            "a": {"schedule__steps": 3},
            "b": {"schedule__steps": 3, "model__attention_dropout": 0.0},
            "c": {"schedule__steps": 3, "seed": 2},
        }.items()
    ]
    assert len({tuple(found) for found in losses}) == 3


def test_pretraining_goes_on_after_any_stop(runs: Any, stop: Any, rows: Rows, whole: RunFolder) -> None:
    """Stopped in the first step, in the middle (twice), in the next epoch, and in the last step."""
    for name, steps in {"first": [1], "twice": [3, 5], "epoch": [9], "last": [10]}.items():
        settings = runs.pretraining(name, trainer__accumulation=2)
        for step in steps:
            stop.by_signal(lambda: runs.run(settings), step)  # noqa: B023
        assert_same_runs(whole, runs.run(settings), rows, ("last.ckpt", "best.ckpt"))


def test_pretraining_goes_on_from_the_last_checkpoint_after_a_crash(
    runs: Any, stop: Any, rows: Rows, whole: RunFolder
) -> None:
    settings = runs.pretraining("crash", trainer__accumulation=2)
    stop.by_crash(lambda: runs.run(settings), 8)
    saved = read_checkpoint(runs.at(settings).last)["allattn"]["step"]
    assert saved == 6
    assert rows(runs.at(settings))[-1]["step"] == "7", "the row of step 7 is there and must be replaced"
    assert_same_runs(whole, runs.run(settings), rows, ("last.ckpt", "best.ckpt"))


@pytest.mark.usefixtures("uneven_gates")
def test_pruning_goes_on_after_any_stop(runs: Any, stop: Any, rows: Rows, dense_run: RunFolder) -> None:
    """In the gate phase, exactly at the freeze (step 5), and after it."""
    files = ("gates.ckpt", "last.ckpt", "best.ckpt")
    whole = runs.run(runs.pruning("whole", dense_run.last))
    for name, steps in {"gates": [3], "freeze": [5], "after": [6], "all": [2, 5, 8]}.items():
        settings = runs.pruning(name, dense_run.last)
        for step in steps:
            stop.by_signal(lambda: runs.run(settings), step)  # noqa: B023
        assert_same_runs(whole, runs.run(settings), rows, files)
    settings = runs.pruning("crash", dense_run.last)
    stop.by_crash(lambda: runs.run(settings), 5)
    stop.by_crash(lambda: runs.run(settings), 7)
    assert_same_runs(whole, runs.run(settings), rows, files)


@pytest.mark.usefixtures("uneven_gates")
def test_a_transformer_xl_goes_on_after_any_stop(runs: Any, stop: Any, rows: Rows) -> None:
    """Pretraining, gate phase, freeze and fine-tuning; what the result says of it."""
    whole = runs.run(runs.pretraining("whole", **TRANSFORMER_XL))
    settings = runs.pretraining("stopped", **TRANSFORMER_XL)
    stop.by_signal(lambda: runs.run(settings), 4)
    assert_same_runs(whole, runs.run(settings), rows, ("last.ckpt", "best.ckpt"))
    pruned = runs.run(runs.pruning("pruned", whole.last))
    settings = runs.pruning("pruned-stopped", whole.last)
    for step in (3, 5, 7):
        stop.by_signal(lambda: runs.run(settings), step)
    assert_same_runs(pruned, runs.run(settings), rows, ("gates.ckpt", "last.ckpt", "best.ckpt"))
    result = json.loads(pruned.result.read_text())
    dense, cut = result["dense"], result["pruned"]
    assert dense["family"] == cut["family"] == "Transformer-XL"
    assert cut["heads_kept"] == [[0, 2, 3], [1]]
    of_a_head = 5 * 16 * 4 + 2 * 4  # d 16, c 4
    assert dense["parameters"]["layers"] - cut["parameters"]["layers"] == 4 * of_a_head


def test_a_model_of_another_family_is_refused_naming_both(runs: Any, stop: Any) -> None:
    """By the folder's settings, and by the checkpoint where one was put into another run's folder."""
    settings = runs.pretraining("one")
    stop.by_signal(lambda: runs.run(settings), 2)
    with pytest.raises(InputError, match=r"feed_forward: 0 -> 6; .*persistent_vectors: 4 -> 0"):
        runs.run(runs.pretraining("one", **TRANSFORMER_XL))
    other = runs.pretraining("other", **TRANSFORMER_XL)
    stop.by_signal(lambda: runs.run(other), 2)
    shutil.copy(runs.at(settings).last, runs.at(other).last)
    with pytest.raises(InputError, match=r"\(All-attention\) .*\(Transformer-XL\): .*feed_forward: 0 -> 6"):
        runs.run(other)


def test_layers_that_are_attention_alone_are_said_once(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither persistent vectors nor a feed-forward sublayer is allowed, but hardly meant."""
    runs.run(runs.pretraining("alone", schedule__steps=2, model__persistent_vectors=0))
    assert capsys.readouterr().out.count("attention alone") == 1
    runs.run(runs.pretraining("hybrid", schedule__steps=2, model__feed_forward=6))
    assert "attention alone" not in capsys.readouterr().out


def test_a_run_from_before_the_feed_forward_sublayer_goes_on(
    runs: Any, stop: Any, rows: Rows, whole: RunFolder
) -> None:
    """Its config.yaml and its checkpoint have no such entries."""
    settings = runs.pretraining("older", trainer__accumulation=2)
    stop.by_signal(lambda: runs.run(settings), 4)
    folder = runs.at(settings)
    saved, checkpoint = yaml.safe_load(folder.config.read_text()), read_checkpoint(folder.last)
    for sizes in (saved["model"], checkpoint["allattn"]["model"]):
        del sizes["feed_forward"], sizes["feed_forward_dropout"]
    folder.config.write_text(yaml.safe_dump(saved))
    torch.save(checkpoint, folder.last)
    assert_same_runs(whole, runs.run(settings), rows, ("last.ckpt", "best.ckpt"))


def test_a_transformer_xl_from_when_empty_tensors_were_trained_goes_on(
    runs: Any, stop: Any, rows: Rows
) -> None:
    """Its optimizer's state names persistent keys and values that have no elements."""
    whole = runs.run(runs.pretraining("whole", **TRANSFORMER_XL))
    settings = runs.pretraining("older", **TRANSFORMER_XL)
    stop.by_signal(lambda: runs.run(settings), 4)
    checkpoint = read_checkpoint(runs.at(settings).last)
    (optimizer,) = checkpoint["optimizer_states"]
    group = next(group for group in optimizer["param_groups"] if group["name"] == "layer_matrices")
    empty = torch.empty(0, 16)
    for number, name in enumerate(("layers.0.persistent_keys", "layers.1.persistent_values"), 1000):
        group["params"].insert(1, number)
        group["param_names"].insert(1, name)
        optimizer["state"][number] = {"exp_avg": empty, "exp_avg_sq": empty}
    torch.save(checkpoint, runs.at(settings).last)
    assert_same_runs(whole, runs.run(settings), rows, ("last.ckpt", "best.ckpt"))


def test_controlled_lambda_goes_on_after_a_stop(
    runs: Any, stop: Any, rows: Rows, dense_run: RunFolder
) -> None:
    """The controller's state is part of the checkpoint, and the target's head count is met."""
    target = {"gates__target_sparsity": 0.375, "trainer__accumulation": 2}
    whole = runs.run(runs.pruning("whole", dense_run.last, **target))
    settings = runs.pruning("stopped", dense_run.last, **target)
    stop.by_signal(lambda: runs.run(settings), 4)
    assert_same_runs(whole, runs.run(settings), rows, ("gates.ckpt", "last.ckpt", "best.ckpt"))
    assert sum(map(len, read_checkpoint(whole.last)["allattn"]["model"]["heads_kept"])) == 5


def count_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the n-th validation loss be n: the first stays the best."""
    scores = itertools.count(1)
    monkeypatch.setattr(runner, "score_split", lambda *args: Score(float(next(scores)), 1))


def test_best_validation_loss_is_remembered_in_pretraining(
    runs: Any, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_up(monkeypatch)
    settings = runs.pretraining("best")
    stop.by_signal(lambda: runs.run(settings), 6)
    folder = runs.run(settings)
    assert read_checkpoint(folder.last)["allattn"]["best"] == 1
    assert read_checkpoint(folder.best)["allattn"]["step"] == 4


def test_best_validation_loss_is_remembered_in_the_gate_phase(
    runs: Any, stop: Any, dense_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_up(monkeypatch)
    settings = runs.pruning("best", dense_run.last, eval__interval=2)
    stop.by_signal(lambda: runs.run(settings), 3)
    assert read_checkpoint(runs.run(settings).gates)["allattn"]["best"] == 1


@pytest.mark.usefixtures("uneven_gates")
def test_scores_of_the_uncut_model_do_not_count_after_the_freeze(
    runs: Any, dense_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_up(monkeypatch)
    folder = runs.run(runs.pruning("best", dense_run.last, eval__interval=2))
    best = read_checkpoint(folder.best)["allattn"]
    assert best["phase"] == "fine_tune"
    assert best["step"] == 6, "the first scoring after the freeze at step 5"


@pytest.mark.parametrize("number", STOPS)
def test_every_stop_signal_saves_and_is_given_back(runs: Any, stop: Any, number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda got, frame: heard.append(got))
    try:
        settings = runs.pretraining("signals", schedule__steps=3)
        stop.by_signal(lambda: runs.run(settings), 2, number)
        assert heard == []
        hand_on(number)
        assert heard == [number], "the listener from before the run, afterwards"
    finally:
        signal.signal(number, before)
    assert read_checkpoint(runs.at(settings).last)["allattn"]["step"] == 2


def test_a_second_signal_ends_the_run_at_once(runs: Any, stop: Any) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGHUP)

    settings = runs.pretraining("twice")
    with stop.acting_in_step(2, twice), pytest.raises(SystemExit) as end:
        runs.run(settings)
    assert end.value.code == 128 + signal.SIGHUP
    assert not runs.at(settings).last.exists(), "checkpoints come every third step"


def test_an_ignored_signal_stays_ignored(runs: Any, stop: Any) -> None:
    """As nohup and a background job's shell ask."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings = runs.pretraining("ignored", schedule__steps=3)
        with stop.acting_in_step(2, lambda: os.kill(os.getpid(), signal.SIGHUP)):
            assert runs.run(settings).result.exists()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_runs_without_signals(runs: Any) -> None:
    """As W&B's sweep agents call a run."""
    folders: list[RunFolder] = []
    thread = threading.Thread(
        target=lambda: folders.append(runs.run(runs.pretraining("thread", schedule__steps=3)))
    )
    thread.start()
    thread.join()
    assert folders[0].result.exists()


def make_loss_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = AllAttentionLM.forward

    def infinite(self: AllAttentionLM, *args: Any, **kwargs: Any) -> Any:
        nats, memory = forward(self, *args, **kwargs)
        return nats * torch.inf, memory

    monkeypatch.setattr(AllAttentionLM, "forward", infinite)


def test_loss_that_is_not_finite_ends_the_run(runs: Any, stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = runs.pretraining("infinite")
    stop.by_signal(lambda: runs.run(settings), 3)
    good = read_checkpoint(runs.at(settings).last)
    make_loss_infinite(monkeypatch)
    with pytest.raises(InputError, match=r"the loss is not finite at step 4 \(learning rate .*last\.ckpt"):
        runs.run(settings)
    assert_same(read_checkpoint(runs.at(settings).last)["state_dict"], good["state_dict"])
    assert not runs.at(settings).result.exists()


def test_signals_are_given_back_after_a_failed_run(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    make_loss_infinite(monkeypatch)
    try:
        with pytest.raises(InputError):
            runs.run(runs.pretraining("failed"))
        assert {number: signal.getsignal(number) for number in numbers} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
