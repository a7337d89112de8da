"""The whole model: masks at the memory's edge, causality, segments with memory, gates and dropout."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.reference import (
    assert_close,
    random_ids,
    random_memory,
    random_model,
    reference_model,
    rounding,
    small_config,
)
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.model.cores.choose import attend
from allattn.model.cores.inputs import Core
from allattn.model.cores.plain import attend_plain
from allattn.model.language_model import AllAttentionLM
from allattn.model.positions import RelativePositions

pytestmark = pytest.mark.numeric

GROWING = {"same_length": False}
EQUAL = {"same_length": True}


def layer_outputs(model: AllAttentionLM, run: Callable[[], object]) -> list[Tensor]:
    """What every layer returns while `run` runs."""
    outputs: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda *call: outputs.append(call[2])) for layer in model.layers]
    run()
    for handle in handles:
        handle.remove()
    return outputs


def log_probs_in_segments(
    model: AllAttentionLM, ids: Tensor, length: int, memory: list[Tensor] | None = None
) -> Tensor:
    """Log-probabilities of a text fed `length` tokens at a time, memory handed on."""
    memory = model.empty_memory(ids.shape[0]) if memory is None else memory
    parts = []
    with torch.no_grad():
        for segment in ids.split(length, dim=1):
            part, memory = model.log_probs(segment, memory)
            parts.append(part)
    return torch.cat(parts, dim=1)


# --- masks (C02)


@pytest.mark.parametrize(("mask", "counts"), [(GROWING, [5, 6, 7, 8]), (EQUAL, [5, 5, 5, 5])])
def test_keys_that_reach_each_row(mask: dict[str, Any], counts: list[int]) -> None:
    """C02: one layer, 4 queries, 4 memory slots: keys per row that carry a gradient."""
    model = random_model(layers=1, **mask)
    memory = [random_memory(model, 1, 4)[0].requires_grad_()]
    inputs: list[Tensor] = []

    def catch(_: nn.Module, __: object, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[0]

    model.embedding.register_forward_hook(catch)
    hidden, _ = model.hidden(random_ids(1, 4), memory)
    for row, count in enumerate(counts):
        of = torch.autograd.grad(hidden[0, row].square().sum(), [memory[0], inputs[0]], retain_graph=True)
        seen = torch.cat(of, dim=1)[0].abs().sum(-1) > 0
        assert seen.sum() == count
        assert not seen[row + 5 :].any()


@pytest.mark.parametrize(("mask", "changed"), [(GROWING, [True] * 4), (EQUAL, [True, False, False, False])])
def test_nudging_the_oldest_memory_slot(mask: dict[str, Any], changed: list[bool]) -> None:
    """C02: row 0 sees the oldest slot; rows 1-3 see it under the growing mask only."""
    model = random_model(layers=1, **mask)
    ids, memory = random_ids(2, 4), random_memory(model, 2, 4)
    before, _ = model.hidden(ids, memory)
    memory[0][:, 0] += torch.randn_like(memory[0][:, 0])
    after, _ = model.hidden(ids, memory)
    difference = (after - before).abs().sum(-1)
    assert (difference > 1e-9).tolist() == [changed] * 2
    assert (difference == 0).tolist() == [[not c for c in changed]] * 2


# --- causality


@pytest.mark.parametrize("memory_present", [0, 4])
@pytest.mark.parametrize("mask", [GROWING, EQUAL])
def test_changing_a_token_changes_no_output_before_it(mask: dict[str, Any], memory_present: int) -> None:
    """In every layer, for every token; it does change every layer's output at the token itself."""
    model = random_model(layers=3, **mask)
    ids, memory = random_ids(2, 7), random_memory(model, 2, memory_present)
    before = layer_outputs(model, lambda: model.hidden(ids, memory))
    assert len(before) == 3
    for t in range(7):
        other = ids.clone()
        other[:, t] = (other[:, t] + 1) % 30
        after = layer_outputs(model, lambda ids=other: model.hidden(ids, memory))
        for one, two in zip(before, after, strict=True):
            difference = (one - two).abs().amax(-1)
            assert (difference[:, :t] < 1e-12).all()
            assert (difference[:, t] > 1e-6).all()


def test_batch_rows_do_not_mix() -> None:
    model = random_model()
    ids, memory = random_ids(3, 5), random_memory(model, 3, 4)
    together, _ = model.log_probs(ids, memory)
    for row in range(3):
        alone, _ = model.log_probs(ids[row : row + 1], [m[row : row + 1] for m in memory])
        assert_close(alone[0], together[row], 1e-12)


# --- segments and memory (C03)


@pytest.mark.parametrize("length", [1, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("memory_length", [1, 4, 6])
def test_segments_equal_the_text_at_once(length: int, dtype: torch.dtype, memory_length: int) -> None:
    """C03. Same length: a query's window does not depend on the cut, so this holds for any number of layers
    and any memory length; with the growing mask only while the memory holds all that came before (below).
    """
    model = random_model(dtype, layers=4, memory_length=memory_length)
    ids = random_ids(2, 23)
    bound = rounding(dtype, 2 * 4 * 12)  # 4 layers sum over 12 entries, twice
    assert_close(log_probs_in_segments(model, ids, length), log_probs_in_segments(model, ids, 23), bound)


@pytest.mark.parametrize("length", [1, 3, 4, 7])
def test_growing_segments_equal_the_text_while_the_memory_holds_it(length: int) -> None:
    model = random_model(layers=3, same_length=False, memory_length=23)
    ids = random_ids(2, 23)
    assert_close(log_probs_in_segments(model, ids, length), log_probs_in_segments(model, ids, 23), 1e-12)


@pytest.mark.parametrize("length", [3, 4, 7])
def test_growing_segments_differ_once_the_memory_is_short(length: int) -> None:
    """A growing query near a segment's end sees more than one near its start: the cut shows."""
    model = random_model(layers=3, same_length=False, memory_length=3)
    ids = random_ids(2, 23)
    cut, whole = log_probs_in_segments(model, ids, length), log_probs_in_segments(model, ids, 23)
    assert_close(cut[:, :length], whole[:, :length], 1e-12)
    assert (cut[:, length:] - whole[:, length:]).abs().max() > 1e-3


@pytest.mark.parametrize("mask", [GROWING, EQUAL])
def test_two_segments_of_four_equal_eight_tokens(mask: dict[str, Any]) -> None:
    """C03's case: positions 4-7 of 2 layers with memory 4, both masks."""
    model = random_model(torch.float32, **mask)
    ids = random_ids(1, 8)
    cut, whole = log_probs_in_segments(model, ids, 4), log_probs_in_segments(model, ids, 8)
    assert_close(cut[:, 4:], whole[:, 4:], rounding(torch.float32, 2 * 2 * 12))


@pytest.mark.parametrize("length", [1, 4, 11])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(EQUAL, id="equal-context"),
        pytest.param({"same_length": False, "memory_length": 11}, id="growing"),
        pytest.param({"cutoffs": []}, id="plain softmax"),
        pytest.param(
            {"heads_kept": [[1, 2], []], "output_scale": [2.0, 4.0], "persistent_vectors": 5}, id="cut"
        ),
    ],
)
def test_model_equals_loop_reference(changes: dict[str, Any], length: int) -> None:
    """Every log-probability of a text fed in segments, against loops over the whole text."""
    model = random_model(**changes)
    ids = random_ids(2, 11)
    with torch.no_grad():
        assert_close(log_probs_in_segments(model, ids, length), reference_model(model, ids), 1e-10)


@pytest.mark.parametrize(("present", "length"), [(0, 3), (0, 6), (2, 3), (4, 1), (4, 6)])
def test_new_memory_is_each_layers_last_inputs(present: int, length: int) -> None:
    """The last M positions before and in the segment, detached, in storage of their own."""
    model = random_model(layers=3)
    ids, memory = random_ids(2, length), random_memory(model, 2, present)
    inputs: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    _, after = model.hidden(ids, memory)
    for old, x, new in zip(memory, inputs, after, strict=True):
        assert torch.equal(new, torch.cat([old, x], dim=1)[:, -4:])
        assert not new.requires_grad
        assert new.untyped_storage().nbytes() == new.nbytes


@pytest.mark.parametrize("length", [0, 2, 9])
def test_memory_length_can_be_overridden(length: int) -> None:
    """The call's memory length acts as the configuration's would; 0 = no memory and no context."""
    model = random_model()
    other = AllAttentionLM(small_config(memory_length=max(length, 1))).double().eval()
    other.load_state_dict(model.state_dict())
    memory, other_memory = model.empty_memory(2), other.empty_memory(2)
    for ids in random_ids(2, 12).split(4, dim=1):
        hidden, memory = model.hidden(ids, memory, memory_length=length)
        if length:
            expected, other_memory = other.hidden(ids, other_memory)
        else:
            single, _ = model.hidden(ids.reshape(-1, 1), model.empty_memory(8))
            expected = single.view(2, 4, -1)
        assert_close(hidden, expected, 1e-12)
        assert memory[0].shape[1] <= length


def test_distances_beyond_the_window_use_no_row() -> None:
    """Same length: rows 0..M of the position table serve, each of them, and no other."""
    model = random_model(layers=2)
    hidden, _ = model.hidden(random_ids(2, 9), random_memory(model, 2, 4))
    (gradient,) = torch.autograd.grad(hidden.square().sum(), [model.positions.table])
    assert (gradient.abs().sum(1) > 0).tolist() == [True] * 5 + [False] * 35


def test_a_distance_without_a_row_is_refused() -> None:
    positions = RelativePositions(small_config(position_rows=6))
    assert positions(9, 5).shape == (9, 12)
    assert positions(6, 9).shape == (6, 12)
    for keys, window in ((7, 6), (7, 99)):
        with pytest.raises(InputError, match=r"distances up to 6.*position_rows=6"):
            positions(keys, window)


# --- gates and dropout


def test_multipliers_reach_their_own_layer_and_head() -> None:
    """Multipliers = the same numbers put into each head's block of WO."""
    model = random_model()
    ids, memory = random_ids(2, 5), random_memory(model, 2, 4)
    multipliers = [torch.tensor([4 / 3, 0.0, 4 / 3, 4 / 3]), torch.tensor([0.0, 0.0, 4.0, 0.0])]
    gated, _ = model.hidden(ids, memory, [m.double() for m in multipliers])
    with torch.no_grad():
        for layer, m in zip(model.layers, multipliers, strict=True):
            layer.output.weight *= m.double().repeat_interleave(3)
    expected, _ = model.hidden(ids, memory)
    assert_close(gated, expected, 1e-12)


def test_all_heads_of_a_layer_gated_off_leave_its_bias() -> None:
    model = random_model(layers=1)
    ids = random_ids(2, 5)
    hidden, _ = model.hidden(ids, model.empty_memory(2), [torch.zeros(4).double()])
    assert_close(hidden, model.embedding(ids) + model.layers[0].bias, 1e-12)


@pytest.mark.parametrize("name", ["attention", "projection", "input", "output", "word"])
def test_every_dropout_acts_in_training_only(name: str) -> None:
    model = random_model(**{f"{name}_dropout": 0.4})
    ids, memory = random_ids(2, 5), random_memory(model, 2, 4)

    def run() -> Tensor:
        return model.hidden(ids, memory)[0]

    assert torch.equal(run(), run())
    model.train()
    assert not torch.equal(run(), run())


def test_no_dropout_no_difference_between_training_and_evaluation() -> None:
    model = random_model()
    ids, memory = random_ids(2, 5), random_memory(model, 2, 4)
    evaluated, _ = model.hidden(ids, memory)
    assert torch.equal(model.train().hidden(ids, memory)[0], evaluated)


def test_forward_scores_what_log_probs_gives() -> None:
    """The loss path of the whole model = the entry of its full distribution; both hand on one memory."""
    model = random_model()
    ids, targets, memory = random_ids(2, 6), random_ids(2, 6), random_memory(model, 2, 3)
    targets[0, 2] = -1
    nats, after = model(ids, targets, memory)
    full, after_full = model.log_probs(ids, memory)
    expected = -full.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    expected[0, 2] = 0
    assert_close(nats, expected, 1e-12)
    assert all(torch.equal(a, b) for a, b in zip(after, after_full, strict=True))


def test_bfloat16_autocast_keeps_losses_in_float32() -> None:
    model = random_model(torch.float32, width=64, heads=4, layers=2)
    ids, targets = random_ids(2, 6), random_ids(2, 6)
    exact, exact_memory = model(ids, targets, model.empty_memory(2))
    exact_again, _ = model(ids, targets, exact_memory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nats, memory = model(ids, targets, model.empty_memory(2))
        again, _ = model(ids, targets, memory)
    assert nats.dtype == again.dtype == torch.float32
    bound = rounding(torch.bfloat16, 2 * 6)  # a layer hands on some six rounded results
    assert_close(nats, exact, bound)
    assert_close(again, exact_again, bound)


def losses_and_gradients(model: AllAttentionLM, ids: Tensor) -> list[Tensor]:
    """Of two segments, on the CPU."""
    memory = model.empty_memory(2)
    losses = []
    for segment in ids.to(model.positions.table.device).split(6, dim=1):
        nats, memory = model(segment[:, :-1], segment[:, 1:], memory)
        losses.append(nats)
    torch.cat(losses).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.detach().cpu() for x in (*losses, *gradients)]


def test_plain_and_recomputing_cores_train_alike() -> None:
    model, ids = random_model(), random_ids(2, 12)
    other = copy.deepcopy(model)
    other.use_core(attend_plain)
    for one, two in zip(losses_and_gradients(model, ids), losses_and_gradients(other, ids), strict=True):
        assert_close(one, two, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("core", [attend, attend_plain])
def test_a_gpu_trains_like_a_cpu(core: Core) -> None:
    model, ids = random_model(), random_ids(2, 12)
    other = copy.deepcopy(model).cuda()
    other.use_core(core)
    for one, two in zip(losses_and_gradients(model, ids), losses_and_gradients(other, ids), strict=True):
        assert_close(two, one, 1e-10)
