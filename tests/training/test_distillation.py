"""Learning from the dense model: the divergence against loops, the teacher's memory, and whole tiny runs."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from support.reference import random_model, reference_log_probs
from support.run_fixtures import DROPOUT, Runs, Stop
from support.sameness import assert_same
from torch import Tensor

from allattn.data.segments import Segment
from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import DistillConfig, Selection
from allattn.training.checkpoints import read_checkpoint, read_resumable
from allattn.training.distillation import NoTeacher, Teacher, divergence
from allattn.training.metrics import read_metrics
from allattn.training.run_folder import RunFolder

TAUGHT = {"distill__weight": 0.5, "distill__temperature": 2.0}
WORDS = torch.randint(30, (2, 13), generator=torch.Generator().manual_seed(2))


def first_level_by_loops(model: AllAttentionLM, vector: Tensor) -> list[float]:
    """Probabilities of the first band's words and of each further band, from those of all words."""
    full = reference_log_probs(model.softmax, model.embedding, vector, model.config).exp().tolist()
    ends = [*model.config.cutoffs, len(full)]
    return full[: ends[0]] + [sum(full[low:high]) for low, high in itertools.pairwise(ends)]


def kl_by_loops(theirs: list[float], ours: list[float], temperature: float) -> float:
    """KL(theirs || ours) of probabilities whose logits are divided by the temperature."""
    p, q = ([x ** (1 / temperature) for x in probabilities] for probabilities in (theirs, ours))
    p, q = ([x / sum(values) for x in values] for values in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("cutoffs", [[8, 18], []])
def test_divergence_equals_loops(cutoffs: list[int], temperature: float) -> None:
    dense, model = random_model(cutoffs=cutoffs), random_model(cutoffs=cutoffs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    hidden = torch.randn(2, 3, 12, dtype=torch.float64)
    theirs, ours = (m.softmax.first_level(hidden, m.embedding) for m in (dense, model))
    expected = [
        kl_by_loops(first_level_by_loops(dense, v), first_level_by_loops(model, v), temperature)
        for v in hidden.flatten(0, 1)
    ]
    assert min(expected) > 1e-4
    found = divergence(theirs, ours, temperature)
    assert found.item() == pytest.approx(sum(expected) / 6, rel=1e-9)
    assert divergence(ours, ours, temperature).item() == pytest.approx(0, abs=1e-14)


def segments() -> list[Segment]:
    """Three consecutive segments of two streams, then their beginning again."""
    inputs, targets = WORDS[:, :-1].split(4, 1), WORDS[:, 1:].split(4, 1)
    places = (0, 1, 2, 0)
    return [Segment(inputs[i], targets[i], 0, starts_over=i == 0) for i in places]


def test_the_teacher_reads_the_streams_with_memory_of_its_own() -> None:
    """In evaluation mode; the memory that the model is handed is none of it."""
    dense, model = random_model(word_dropout=0.5, attention_dropout=0.5), random_model()
    teacher = Teacher(dense.train(), DistillConfig(weight=0.5))
    for segment in segments():
        if segment.starts_over:
            memory = dense.empty_memory(2)
        theirs, memory = dense.first_level(segment.inputs, memory)  # by now in evaluation mode
        own = model.empty_memory(2)
        nats, ours, after = model.with_first_level(segment.inputs, segment.targets, own)
        losses, returned = teacher.losses(model, segment, own, None)
        assert torch.equal(losses["divergence"], divergence(theirs, ours, 1.0))
        assert torch.equal(losses["loss"], nats.mean())
        assert all(map(torch.equal, returned, after))
        assert all(map(torch.equal, teacher.memory[0], memory))
    total = teacher.total(losses)
    assert float(total) == pytest.approx(float(losses["loss"] + losses["divergence"]) / 2)
    total.backward()
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_temperature_squared_keeps_the_size() -> None:
    teacher = Teacher(random_model(), DistillConfig(weight=0.25, temperature=3.0))
    losses = {"loss": torch.tensor(4.0), "divergence": torch.tensor(0.5)}
    assert float(teacher.total(losses)) == 0.75 * 4 + 0.25 * 9 * 0.5
    assert float(NoTeacher().total(losses)) == 4


def test_weight_0_is_no_teacher_at_all(
    runs: Runs, dense_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number and tensor is that of a run that says nothing of distillation."""
    plain = runs.run(runs.pruning("plain", dense_run.last))
    monkeypatch.setattr(Teacher, "__init__", lambda *_: pytest.fail("a teacher was made"))
    off = {"distill__weight": 0.0, "distill__temperature": 5.0, "distill__gates": True}
    folder = runs.run(runs.pruning("off", dense_run.last, **off))
    assert_same(folder, plain)
    assert read_checkpoint(folder.last)["allattn"]["teacher_memory"] == []
    assert "divergence" not in read_metrics(folder.metrics)[0]


def test_a_model_that_is_still_the_dense_one_diverges_by_nothing(runs: Runs) -> None:
    """Over more than an epoch of the text (9 steps), with two groups of streams."""
    dense = runs.run(runs.pretraining("dense", **{f"model__{name}": 0.0 for name in DROPOUT}))
    same = {"gates__selection": Selection.random, "gates__target_sparsity": 0.0, **TAUGHT}
    same |= {"optimizer__learning_rate": 1e-12, "schedule__steps": 12, "trainer__accumulation": 2}
    rows = read_metrics(runs.run(runs.pruning("same", dense.last, **same)).metrics)
    assert len(rows) == 12
    for row in rows:
        assert abs(float(row["divergence"])) < 1e-5
        assert float(row["loss_total"]) == pytest.approx(float(row["loss"]) / 2, rel=1e-4)


@pytest.mark.usefixtures("uneven_gates")
@pytest.mark.parametrize("gates", [False, True], ids=["after the gates", "with gates"])
def test_a_taught_run_goes_on_after_any_stop(
    runs: Runs, dense_run: RunFolder, stop: Stop, gates: bool
) -> None:
    taught = {**TAUGHT, "distill__gates": gates, "trainer__accumulation": 2}
    whole = runs.run(runs.pruning("whole", dense_run.last, **taught))
    said = ["divergence" in row for row in read_metrics(whole.metrics)]
    assert said == [gates] * 5 + [True] * 5, "the freeze is at step 5"
    meta = read_checkpoint(whole.last)["allattn"]
    assert [layer.shape for layer in meta["teacher_memory"]] == [(4, 4, 16)] * 2
    assert not torch.equal(meta["teacher_memory"][1], meta["memory"][1])
    settings = runs.pruning("stopped", dense_run.last, **taught)
    for step in (3, 5, 7):
        stop.by_signal(lambda: runs.run(settings), step)
    assert_same(runs.run(settings), whole)
    crashed = runs.pruning("crashed", dense_run.last, **taught)
    for step in (5, 8):
        stop.by_crash(lambda: runs.run(crashed), step)
    assert_same(runs.run(crashed), whole)


def test_the_teacher_changes_what_is_learned(runs: Runs, dense_run: RunFolder) -> None:
    chosen = {"gates__selection": Selection.random, "gates__target_sparsity": 0.5}
    losses = {}
    for name, taught in {"none": {}, "half": TAUGHT, "hot": TAUGHT | {"distill__temperature": 4.0}}.items():
        folder = runs.run(runs.pruning(name, dense_run.last, **chosen | taught))
        losses[name] = [row["loss"] for row in read_metrics(folder.metrics)]
    assert len({of[0] for of in losses.values()}) == 1, "the first loss is that of the same model"
    assert len({of[1] for of in losses.values()}) == 3


def test_a_checkpoint_with_another_models_teacher_memory_is_refused(
    runs: Runs, dense_run: RunFolder, stop: Stop, tmp_path: Path
) -> None:
    settings = runs.pruning("run", dense_run.last, distill__gates=True, **TAUGHT)
    stop.by_signal(lambda: runs.run(settings), 3)
    checkpoint = read_resumable(runs.at(settings).last)
    checkpoint["allattn"]["teacher_memory"] = [torch.zeros(4, 4, 17)] * 2
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="no run can go on from its segment memory"):
        read_resumable(tmp_path / "other.ckpt")
