"""What a training step takes in memory, by running it on tensors that have shapes and no numbers."""

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allattn.model.config import ModelConfig
from allattn.model.cores.inputs import Core
from allattn.model.cores.plain import attend_plain
from allattn.model.cores.recompute import attend_recompute
from allattn.model.cores.workspace import Elsewhere
from allattn.model.language_model import AllAttentionLM
from allattn.training.config import OptimizerName

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process, weights whole in it."""

    weights: int
    moments: int  # of the optimizer
    segment_memory: int  # of the segment before; a step also makes the next one
    held: int  # from the forward to the backward pass: activations, mask bits, log-probabilities, new memory
    step: int  # the most that forward and backward pass take at a time, `held` and gradients included

    @property
    def total(self) -> int:
        """The most that training takes, without torch itself and what its allocator leaves unused."""
        return self.weights + self.moments + self.segment_memory + self.step


def step_memory(
    config: ModelConfig,
    rows: int,
    tokens: int,
    core: str,
    precision: str = "32-true",
    optimizer: OptimizerName = OptimizerName.lamb,
    keep_buffers: bool = True,
) -> StepMemory:
    """Calculate a step from torch's own shapes: nothing of its size is allocated.

    The operations are a CPU's. A GPU holds dropout masks of the layers' outputs in a byte instead of four and
    may fuse, so it takes a little less. Bands get their share of words by P(rank) ~ 1 / (rank + 1).

    Args:
        config: of the model, with a full memory.
        rows: text streams of one process and one group of accumulation.
        tokens: of a segment.
        core: plain or recompute.
        precision: as trainer.precision.
        optimizer: whose moments are counted.
        keep_buffers: whether the recomputing core's buffers stay between its calls, as on a CPU.
    """
    size = 2 if precision == "64-true" else 1  # of everything, against float32
    cores: dict[str, Core] = {
        "plain": attend_plain,
        "recompute": partial(attend_recompute, workspace=_Kept() if keep_buffers else Elsewhere()),
    }
    places = _words_in_bands(config, rows * tokens)
    with FakeTensorMode():
        model = AllAttentionLM(config).train()
        model.use_core(cores[core])
        shape = (rows, config.memory_length, config.width)
        memory = [torch.empty(shape) for _ in model.stack]
        words = torch.zeros(rows, tokens, dtype=torch.int64)
        mixed = torch.autocast("cpu", _MIXED[precision]) if precision in _MIXED else nullcontext()
        with _Allocations(places, [*model.parameters(), *memory]) as allocations:
            with mixed:
                nats, _after = model(words, words, memory)
            held = allocations.now
            nats.mean().backward()
    weights = sum(p.nbytes for p in model.parameters())
    return StepMemory(
        weights=size * weights,
        moments=size * _moments(model, optimizer),
        segment_memory=size * sum(x.nbytes for x in memory),
        held=size * held,
        step=size * allocations.most,
    )


def _moments(model: AllAttentionLM, optimizer: OptimizerName) -> int:
    """Two of a weight's size each, but one for Muon's matrices of layers."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    single = [
        p.nbytes
        for name, p in trained
        if optimizer is OptimizerName.muon and p.ndim == 2 and name.startswith("layers.")
    ]
    return 2 * sum(p.nbytes for _, p in trained) - sum(single)


def _words_in_bands(config: ModelConfig, tokens: int) -> Iterator[int]:
    """How many places of each band a step asks for: of every band to embed, of the tails to predict."""
    before = [round(tokens * math.log1p(end) / math.log1p(config.band_ends[-1])) for end in config.band_ends]
    counts = [end - start for start, end in pairwise([0, *before])]
    return iter([*counts, *counts[1:]])


class _Kept(Elsewhere):
    """Buffers that stay, as a CPU's."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The one of that name, shape and dtype."""
        key = name, shape, like.dtype
        if key not in self.kept:
            self.kept[key] = super().buffer(name, shape, like)
        return self.kept[key]


class _Allocations(TorchDispatchMode):
    """Bytes of the storages that operations made and that still live; those of `outside` are not counted.

    Attributes:
        now: at present.
        most: at any time so far.
    """

    def __init__(self, places: Iterator[int], outside: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._places = places
        self._known = {x.untyped_storage()._cdata for x in outside}  # views of them are no new storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:  # its result's shape is in the numbers
            result = args[0].new_empty((next(self._places), 1), dtype=torch.int64)
        else:
            result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
