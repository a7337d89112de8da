"""The benchmark's actions: counted as torch counts them, and doing what they say."""

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from allattn.benchmark.arithmetic import forward_products, training_products
from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.memory import peak_bytes
from allattn.benchmark.subject import Subject, Variant, new_model, text, with_heads, zipf_ids
from allattn.benchmark.yardstick import attend_yardstick
from allattn.model.config import ModelConfig
from allattn.model.cores.choose import attend
from allattn.model.cores.plain import attend_plain

CPU = torch.device("cpu")


def tiny(cutoffs: tuple[int, ...] = (20, 60), **changes: Any) -> BenchmarkConfig:
    sizes: dict[str, Any] = {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "persistent_vectors": 6,
        "memory_length": 8,
    }
    model = ModelConfig(vocabulary_size=400, position_rows=16, cutoffs=list(cutoffs), **sizes)
    return BenchmarkConfig(model=model, batch_size=4, segment_length=8, **changes)


def subject(config: BenchmarkConfig, heads: list[int] | None = None, **variant: Any) -> Subject:
    sizes = config.model if heads is None else with_heads(config.model, heads)
    return Subject(new_model(sizes, 1), config, Variant("any", **variant), CPU)


class NoModules(nullcontext[None]):
    """In place of the counter's record by module, which does not work under `torch.autograd.grad`."""

    parents = frozenset({"Global"})


def operations(action: Callable[[], None]) -> int:
    """Operations that torch counts in matrix products."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter:
        action()
    return counter.get_total_flops()


@pytest.mark.parametrize("core", [attend_plain, attend_yardstick])
@pytest.mark.parametrize("heads", [[4, 4], [3, 1, 0, 2], [0]], ids=str)
@pytest.mark.parametrize(
    ("cutoffs", "family"),
    [((20, 60), {}), ((), {}), ((20, 60), {"persistent_vectors": 0, "feed_forward": 9})],
    ids=str,
)
def test_multiply_adds_are_half_of_torchs_operations(
    core: Any, heads: list[int], cutoffs: tuple[int, ...], family: dict[str, int]
) -> None:
    config = tiny(cutoffs)
    config.model = replace(config.model, **family)
    one = subject(config, heads, core=core)
    counted = forward_products(one.model.config, one.segment.inputs, one.segment.targets)
    for parts, training, inference in (
        (counted.layers, one.layers_training, one.layers_inference),
        (counted.core, one.core_training, None),
        (counted.softmax, one.softmax_training, None),
        (counted.embedding, one.embedding_training, None),
        (counted.total, None, one.evaluation),
    ):
        for action, expected in ((training, training_products(parts)), (inference, parts)):
            if action is not None:
                assert operations(action) == 2 * expected
    step = operations(one.training_step)
    read = forward_products(one.model.config, one.segment.inputs, one.segment.targets)
    assert step == 2 * training_products(read.total)


def test_zipf_words_touch_every_band_at_the_papers_size() -> None:
    ends = [0, 20_000, 40_000, 200_000, 267_735]
    config = BenchmarkConfig()
    stream = text(config, config.model)
    for index in range(len(stream)):
        segment = stream.micro_batch(index)
        assert segment.targets.shape == (4, 192)
        counts, _ = np.histogram(segment.targets, ends)
        assert counts.min() > 0
        assert counts[0] > 0.7 * segment.targets.numel()
    ids = zipf_ids(1000, 200_000, 0)
    assert ids.min() == 0
    assert ids.max() == 999
    share = np.log(11) / np.log(1001)  # of the ten most frequent words, where P ~ 1 / (rank + 1)
    assert (ids < 10).mean() == pytest.approx(share, rel=0.02)


def test_variants_compute_the_same_model() -> None:
    config = tiny()
    for name in ("attention", "projection", "input", "output", "word"):
        setattr(config.model, f"{name}_dropout", 0.0)
    ours, yardstick = subject(config, core=attend), subject(config, core=attend_yardstick)
    before = copy.deepcopy(ours.model.state_dict())
    yardstick.memory = ours.memory
    for one in (ours, yardstick):
        one.training_step()
    after = [one.model.state_dict() for one in (ours, yardstick)]
    for name, start in before.items():
        torch.testing.assert_close(after[0][name], after[1][name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(after[0][name], start), name


def test_actions_leave_the_gradients_of_the_step() -> None:
    one = subject(tiny(), precision="bfloat16")
    one.training_step()
    grads = [p.grad.clone() for p in one.model.parameters()]
    assert all(grad.dtype == torch.float32 for grad in grads)
    for action in (one.layers_training, one.core_training, one.softmax_training, one.embedding_training):
        action()
    for kept, p in zip(grads, one.model.parameters(), strict=True):
        assert torch.equal(kept, p.grad)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peak_memory_is_that_of_the_scores() -> None:
    """Wide scores: 8 rows x 4 heads x 64 x (128 + 4096) float32 is 34.6 MB; autograd keeps several."""
    config = tiny(squares=[8])
    config.model.memory_length, config.model.position_rows = 64, 128
    config.model.persistent_vectors, config.model.layers = 4096, 1
    config.batch_size, config.segment_length = 8, 64
    scores = 8 * 4 * 64 * (128 + 4096) * 4
    plain, ours = (
        peak_bytes(config, Variant("", core=core), "layers_training", CPU)
        for core in (attend_yardstick, attend)
    )
    assert plain is not None
    assert ours is not None
    assert 3 * scores < plain < 12 * scores
    assert ours < 0.5 * plain
