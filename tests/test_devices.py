"""Copies to a device; every path with the model on another device than the CPU, on tensors without numbers.

Such tensors refuse any mixture with the CPU's, and whoever reads a number of them: a path that passes leaves
nothing on the CPU and makes the host wait for nothing. The device is cuda where there is one, else meta, as a
torch without CUDA slices no fake tensors of cuda and builds no graph of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.reference import small_config
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allattn.data.segments import Segment
from allattn.devices import float32_products, to_device
from allattn.heads.all_attention import OwnModel
from allattn.heads.masks import DynamicMask
from allattn.heads.ranking import Scope, keep_highest
from allattn.heads.scores import SCORES, text_scores
from allattn.heads.watched import Batch
from allattn.model import words
from allattn.model.bands import BandCounts
from allattn.model.cores.choose import CORES
from allattn.model.generation import generate_tokens
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import DistillConfig, GatesConfig, Penalty
from allattn.pruning.objective import FrozenGates, NoGates, Objective, learned_gates
from allattn.pruning.surgery import cut_tensor, plan_removal
from allattn.randomness import generator
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig
from allattn.training.distillation import Teacher
from allattn.training.lamb import WholeNormLamb
from allattn.training.language_task import LanguageTask
from allattn.training.optimizers import clip_gradients, make_optimizer, set_learning_rates
from allattn.training.scoring import score

DEVICE = "cuda" if torch.cuda.is_available() else "meta"
ROWS, TOKENS = 2, 6
DROPOUT = {
    f"{name}_dropout": 0.1 for name in ("attention", "projection", "feed_forward", "input", "output", "word")
}
GATES = GatesConfig(lambda_max=0.5, lambda_warmup_steps=0, freeze_step=9)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The other device. Words are counted as if two were rare; reading a number of a CPU's tensor gives 0."""

    def of_the_cpu(x: FakeTensor) -> int:
        assert x.device.type == "cpu", "the host waits for the device"
        return 0

    counts = BandCounts([ROWS * TOKENS - 2, 1, 1], [1, 1])
    monkeypatch.setattr(words, "count_bands", lambda inputs, targets, ends: counts)
    monkeypatch.setattr(FakeTensor, "__float__", lambda x: float(of_the_cpu(x)), raising=False)
    monkeypatch.setattr(FakeTensor, "__int__", of_the_cpu, raising=False)
    monkeypatch.setattr(FakeTensor, "__bool__", lambda x: bool(of_the_cpu(x)), raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield DEVICE


def made(device: str, **changes: Any) -> AllAttentionLM:
    """A model with three bands, on the device."""
    with torch.device(device):
        return AllAttentionLM(small_config(**changes))


def segment(starts_over: bool = True) -> Segment:
    """On the CPU, as the text gives it."""
    ids = torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)
    return Segment(ids[:, :-1], ids[:, 1:], 0, starts_over)


def objective(kind: str, model: AllAttentionLM, device: str) -> Objective:
    """What training adds to the loss, on the device."""
    if kind in ("none", "frozen"):
        return NoGates() if kind == "none" else FrozenGates(model.config)
    made = {
        "schedule": GATES,
        "no scaling": replace(GATES, output_scaling=False),
        "hard penalty": replace(GATES, penalty=Penalty.hard, scale_gradient=True),
        "target": replace(GATES, target_sparsity=0.5),
    }
    with torch.device(device):
        return learned_gates(made[kind], model.config, 1)


def test_these_tensors_refuse_the_cpu_and_readers(device: str) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(FakeTensorDeviceMismatchError):
        x + torch.ones(3)
    with pytest.raises(AssertionError, match="the host waits"):
        float(x.sum())
    with pytest.raises(AssertionError, match="the host waits"):
        bool(x.sum() > 0)


@pytest.mark.parametrize("kind", ["none", "frozen", "schedule", "no scaling", "hard penalty", "target"])
@pytest.mark.parametrize("core", CORES)
def test_a_training_step(device: str, kind: str, core: str) -> None:
    """Two steps, the second with memory, of every objective and core; no number is read."""
    model = made(device, feed_forward=8, heads_kept=[[0, 2, 3], []], **DROPOUT).train()
    model.use_core(CORES[core])
    task = LanguageTask(model, objective(kind, model, device), OptimizerConfig(), ScheduleConfig(), 1)
    for starts_over in (True, False):
        loss = task.training_step(segment(starts_over), 0)
        loss.backward()
    assert loss.device.type == device
    assert all(x.device.type == device for x in task.memory[0])
    trained = [p for p in task.parameters() if p.requires_grad and p.numel()]
    assert all(p.grad is not None and p.grad.device == p.device for p in trained)
    step = {name: value for name, value in task.last.items() if isinstance(value, Tensor)}
    assert "loss" in step, "measured, and not read"


class _CopiesFromCpu(TorchDispatchMode):
    """Dtypes of what is copied from the CPU to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and result.device.type == DEVICE:
            self.dtypes += [x.dtype for x in given if x.device.type == "cpu" and x.ndim]
        return result


@pytest.mark.parametrize("kind", ["schedule", "no scaling", "target"])
def test_a_step_of_the_gates_in_groups(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates of two groups: no number is read, and words and the gates' noise alone are copied."""
    monkeypatch.setattr(WholeNormLamb, "_can_use_foreach", lambda self, group: True)
    model = made(device, **DROPOUT).train()
    task = LanguageTask(
        model, objective(kind, model, device), OptimizerConfig(), ScheduleConfig(), 1, accumulation=2
    )
    optimizer = make_optimizer(task._parameter_groups(), OptimizerConfig(), fused=False)
    for starts_over in (True, False):
        for group in (0, 1):
            with _CopiesFromCpu() as copies:
                task.training_step(segment(starts_over)._replace(group=group), 0).backward()
            assert copies.dtypes == [torch.float32, torch.int64, torch.int64], "noise, inputs, targets"
        with _CopiesFromCpu() as copies:
            clip_gradients([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            set_learning_rates(optimizer, 0.1, 0.5)
            optimizer.step()
        assert copies.dtypes == []
    assert all(x.device.type == device for memory in task.memory.values() for x in memory)
    assert len(task.memory) == 2
    assert all(x.device.type == device for x in task.last.values() if isinstance(x, Tensor))


def test_a_training_step_with_a_teacher(device: str) -> None:
    model, dense = made(device).train(), made(device)
    teacher = Teacher(dense, DistillConfig(weight=0.5))
    task = LanguageTask(model, NoGates(), OptimizerConfig(), ScheduleConfig(), 1, teacher=teacher)
    for starts_over in (True, False):
        task.training_step(segment(starts_over), 0).backward()
    assert {name: x.device.type for name, x in task.last.items()} == {"loss": device, "divergence": device}
    assert all(x.device.type == device for x in teacher.memory[0])


@pytest.mark.parametrize("name", OptimizerName, ids=str)
def test_an_update(device: str, name: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and weights, as on a GPU: LAMB for all weights together."""
    monkeypatch.setattr(WholeNormLamb, "_can_use_foreach", lambda self, group: True)
    model = made(device)
    task = LanguageTask(model, objective("schedule", model, device), OptimizerConfig(), ScheduleConfig(), 1)
    optimizer = make_optimizer(task._parameter_groups(), OptimizerConfig(name=name), fused=False)
    for _ in range(2):
        task.training_step(segment(), 0).backward()
        norm = clip_gradients([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        assert norm.device.type == device
        set_learning_rates(optimizer, 0.1, 0.5)
        optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if getattr(x, "ndim", 0)]
    assert moments
    assert all(x.device.type == device for x in moments)


@pytest.mark.parametrize("kind", ["none", "schedule", "no scaling", "target"])
def test_scoring(device: str, kind: str) -> None:
    """The losses alone come to the CPU, once a segment."""
    model = made(device)
    gates = objective(kind, model, device).decided_multipliers()
    found = score(model, [segment(), segment(False)], gates)
    assert (found.nats, found.tokens) == (0, 0), "read on the CPU"


def test_selection(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score of a text; they come to the CPU at the end."""

    def of_the_cpu(x: Tensor) -> Tensor:
        assert x.device.type == "cpu"
        return x.new_empty((x.numel(), 1), dtype=torch.int64)

    monkeypatch.setattr(FakeTensor, "nonzero", of_the_cpu, raising=False)
    model = made(device, heads_kept=[[0, 2, 3], []])
    text = [
        Batch(one.inputs, one.targets, torch.ones_like(one.inputs, dtype=torch.bool))
        for one in (segment(), segment(False))
    ]
    usable = [name for name, score in SCORES.items() if not score.needs_no_memory]
    for scores in text_scores(OwnModel(model), text, usable, memory=True, noise=generator(1, "")).values():
        assert [x.shape for x in scores] == [(3,), (0,)]
        assert all(x.device.type == "cpu" for x in scores)
        keep_highest(scores, 2, Scope.all_layers)


def test_removal() -> None:
    gates = [torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 0, 0])]
    plan = plan_removal(small_config(), gates, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, weight in made(DEVICE).named_parameters():
            assert cut_tensor(name, weight, plan).device.type == DEVICE


@pytest.mark.parametrize("same_length", [True, False])
def test_generation(device: str, same_length: bool) -> None:
    """Reading the prompt and word after word with the cache; a word is chosen from probabilities there."""
    seen = []

    def choose(log_probs: Tensor) -> int:
        seen.append((log_probs.shape, log_probs.device.type))
        return 3

    model = made(device, cutoffs=[], same_length=same_length, heads_kept=[[0, 2, 3], []]).eval()
    assert list(generate_tokens(model, [1, 2, 3, 4, 5], 4, choose)) == [3] * 4
    assert seen == [((30,), device)] * 4


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_copy_to_a_gpu_is_pinned_and_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    words = torch.arange(12).view(3, 4)[:, :-1]
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: asked.append(x.is_contiguous()) or x)
    monkeypatch.setattr(Tensor, "to", lambda x, *to, **how: asked.append((to, how)) or x)
    copied = to_device(words, torch.device(name))
    assert asked == [True, ((torch.device(name),), {"non_blocking": True})]
    assert torch.equal(copied, words)


def test_on_the_cpu_nothing_is_copied() -> None:
    words = torch.arange(12)
    assert to_device(words, torch.device("cpu")) is words


@pytest.mark.gpu
def test_pinned_copies_arrive() -> None:
    words = torch.arange(12).view(3, 4)[:, :-1]
    assert torch.equal(to_device(words, torch.device("cuda")).cpu(), words)


@pytest.mark.gpu
def test_a_training_step_does_not_wait_for_a_gpu() -> None:
    """torch itself raises where the host would wait; the first step may, for what is made once."""
    model = AllAttentionLM(small_config(**DROPOUT)).cuda().train()
    task = LanguageTask(model, objective("schedule", model, "cuda"), OptimizerConfig(), ScheduleConfig(), 1)
    optimizer = make_optimizer(task._parameter_groups(), OptimizerConfig())
    for number in range(3):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            task.training_step(segment(number == 0), 0).backward()
            clip_gradients([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_precision_of_products_is_as_before_afterwards() -> None:
    before = torch.get_float32_matmul_precision()
    with float32_products("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    "score", [name for name, score in SCORES.items() if score.per_sequence and name != "random"]
)
def test_a_dynamic_mask(device: str, score: str) -> None:
    """The head study's zeroing; no number is read before `share` is asked for."""
    model = OwnModel(made(device, feed_forward=8, heads_kept=[[0, 2, 3], []]))
    part = segment()
    batch = Batch(part.inputs, part.targets, torch.ones(ROWS, TOKENS, dtype=torch.bool))
    mask = DynamicMask(model.layers, score, tau=0.5)
    with model.watch(mask), torch.no_grad():
        nats, _ = model.nats(batch)
    assert nats.device.type == device
