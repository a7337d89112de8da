"""The tied adaptive softmax: values, its two paths, tying, precision."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from support.reference import (
    assert_close,
    gradients,
    random_model,
    reference_log_probs,
    rounding,
    small_config,
)
from torch import Tensor

from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM

pytestmark = pytest.mark.numeric

HUNDRED = {"vocabulary_size": 100, "cutoffs": [10, 40]}  # C11's vocabulary


def loss(model: AllAttentionLM, hidden: Tensor, targets: Tensor) -> Tensor:
    return model.softmax(hidden, targets, model.embedding)


def random_hidden(model: AllAttentionLM, *shape: int) -> Tensor:
    return torch.randn(*shape, model.config.width, dtype=model.positions.table.dtype)


def test_all_weights_zero() -> None:
    """C11: head of 10 words and 2 clusters, bands of 30 and 60: ln 12, ln 12 + ln 30, ln 12 + ln 60."""
    model = AllAttentionLM(small_config(**HUNDRED))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    hidden = torch.randn(1, 3, 12)
    expected = torch.tensor([[math.log(12), math.log(12) + math.log(30), math.log(12) + math.log(60)]])
    ids = torch.tensor([[5, 20, 70]])
    bound = rounding(torch.float32, 60)  # the longest sum
    assert_close(loss(model, hidden, ids), expected, bound)
    full = model.softmax.log_probs(hidden, model.embedding)
    assert_close(-full[0, [0, 1, 2], ids[0]], expected[0], bound)


@pytest.mark.parametrize("changes", [HUNDRED, HUNDRED | {"cutoffs": []}, HUNDRED | {"cutoffs": [1]}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalised_and_loss_path_equals_full_path(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """C11: probabilities sum to 1; both paths agree at every word (0, 9, 10, 39, 40, 99 among them)."""
    model = random_model(dtype, **changes)
    hidden = random_hidden(model, 4)
    full = model.softmax.log_probs(hidden, model.embedding)
    assert full.shape == (4, 100)
    assert full.dtype == dtype
    bound = rounding(dtype, 12 + 100)  # a logit sums the width, its normaliser the words
    assert_close(full.exp().sum(1), torch.ones(4, dtype=dtype), bound * full.abs().max().item())
    words = torch.arange(100)
    for row in range(4):
        nats = loss(model, hidden[row].expand(1, 100, -1), words.unsqueeze(0))
        assert nats.shape == (1, 100)
        assert_close(nats[0], -full[row], bound)


@pytest.mark.parametrize("cutoffs", [[8, 18], [20], [1, 2, 29], []])
def test_equals_independent_formula(cutoffs: list[int]) -> None:
    model = random_model(cutoffs=cutoffs)
    hidden = random_hidden(model, 3, 2)
    full = model.softmax.log_probs(hidden, model.embedding)
    assert full.shape == (3, 2, 30)
    for vector, row in zip(hidden.flatten(0, 1), full.flatten(0, 1), strict=True):
        assert_close(row, reference_log_probs(model.softmax, model.embedding, vector, model.config), 1e-12)


@pytest.mark.parametrize("cutoffs", [[8, 18], []])
def test_gradients_equal_those_of_the_independent_formula(cutoffs: list[int]) -> None:
    """Of the loss, for every parameter of both sides and for the hidden vectors."""
    model = random_model(cutoffs=cutoffs)
    hidden = random_hidden(model, 2, 4).requires_grad_()
    targets = torch.tensor([[3, 8, 29, -1], [17, 0, 18, 7]])
    of = [hidden, *model.softmax.parameters(), *model.embedding.parameters()]

    expected = hidden.new_zeros(())
    for vector, word in zip(hidden.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if word >= 0:
            expected = (
                expected - reference_log_probs(model.softmax, model.embedding, vector, model.config)[word]
            )
    nats = loss(model, hidden, targets).sum()
    assert_close(nats, expected, 1e-12)
    for one, two in zip(gradients(nats, of), gradients(expected, of), strict=True):
        assert_close(one, two, 1e-10)


@pytest.mark.parametrize("cutoffs", [[8, 18], []])
def test_first_level_is_the_first_words_and_the_mass_of_each_band(cutoffs: list[int]) -> None:
    """And the loss that is taken from it is the loss, with the same gradients."""
    model = random_model(cutoffs=cutoffs)
    hidden = random_hidden(model, 2, 4).requires_grad_()
    targets = torch.tensor([[3, 8, 29, -1], [17, 0, 18, 7]])
    nats, first = model.softmax.with_first_level(hidden, targets, model.embedding)
    ends = [*cutoffs, 30]
    full = model.softmax.log_probs(hidden, model.embedding)
    bands = [full[..., low:high].logsumexp(-1, keepdim=True) for low, high in itertools.pairwise(ends)]
    assert_close(first, torch.cat([full[..., : ends[0]], *bands], -1), 1e-12)
    assert torch.equal(model.softmax.first_level(hidden, model.embedding), first)
    expected = loss(model, hidden, targets)
    assert_close(nats, expected, 1e-12)
    of = [hidden, *model.softmax.parameters(), *model.embedding.parameters()]
    for one, two in zip(gradients(nats.sum(), of), gradients(expected.sum(), of), strict=True):
        assert_close(one, two, 1e-10)


@pytest.mark.parametrize("words", [[0, 9, 5], [10, 39, 12], [40, 99, 41], [3, 50, 60]])
def test_bands_without_a_target(words: list[int]) -> None:
    """C11: no target in one, two or all but one of the clusters; losses and gradients are there."""
    model = random_model(**HUNDRED)
    hidden = random_hidden(model, 1, 3).requires_grad_()
    nats = loss(model, hidden, torch.tensor([words]))
    full = model.softmax.log_probs(hidden, model.embedding)
    assert_close(nats[0], -full[0, [0, 1, 2], words], 1e-12)
    nats.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("cutoffs", [[10, 40], []])
def test_negative_targets_are_not_scored(cutoffs: list[int]) -> None:
    """Loss 0 and no gradient to the hidden vector; all of them negative works too."""
    model = random_model(vocabulary_size=100, cutoffs=cutoffs)
    hidden = random_hidden(model, 2, 3).requires_grad_()
    targets = torch.tensor([[5, -1, 20], [-100, 70, -1]])
    scored = targets >= 0
    nats = loss(model, hidden, targets)
    assert torch.equal(nats == 0, ~scored)
    (gradient,) = torch.autograd.grad(nats.sum(), [hidden])
    assert torch.equal(gradient.abs().sum(-1) > 0, scored)
    none = loss(model, hidden, torch.full((2, 3), -1))
    assert none.tolist() == [[0.0] * 3] * 2
    assert not any(g.any() for g in gradients(none.sum(), list(model.softmax.parameters())))


def test_both_sides_give_gradient_to_the_tied_parameters() -> None:
    """Tables and tail projections get the input's plus the output's; band 0's projection the input's only."""
    model = random_model(memory_length=2)
    ids = torch.tensor([[1, 9, 20, 7, 10, 29]])
    targets = ids.roll(-1, dims=1)
    outside = copy.deepcopy(model.embedding)  # untied: an embedding of its own for the output
    hidden, _ = model.hidden(ids, model.empty_memory(1))
    model.softmax(hidden, targets, outside).sum().backward()
    from_input = {name: p.grad.clone() for name, p in model.embedding.named_parameters()}
    from_output = {name: p.grad for name, p in outside.named_parameters()}
    model.zero_grad()
    nats, _ = model(ids, targets, model.empty_memory(1))
    nats.sum().backward()
    for name, parameter in model.embedding.named_parameters():
        output = from_output[name]
        assert from_input[name].abs().max() > 1e-6, name
        if name == "projections.0":
            assert output is None
            output = torch.zeros_like(parameter)
        else:
            assert output.abs().max() > 1e-6, name
        assert_close(parameter.grad, from_input[name] + output, 1e-10, name)


def test_the_softmax_holds_no_table_of_its_own() -> None:
    """Its parameters: per band a bias, the head projection, the cluster rows and their bias."""
    model = AllAttentionLM(small_config(**HUNDRED))
    shapes = {name: tuple(p.shape) for name, p in model.softmax.named_parameters()}
    assert shapes == {
        "biases.0": (10,),
        "biases.1": (30,),
        "biases.2": (60,),
        "head_projection": (12, 12),
        "cluster_weight": (2, 12),
        "cluster_bias": (2,),
    }


def test_bfloat16_hidden_under_autocast_gives_float32_losses() -> None:
    """Exactly the losses of the same hidden vectors in float32, both paths, and close to float64."""
    model = random_model(torch.float32, **HUNDRED, width=64)
    hidden = random_hidden(model, 2, 3).bfloat16()
    targets = torch.tensor([[5, 20, 70], [9, 39, 99]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nats = loss(model, hidden, targets)
        full = model.softmax.log_probs(hidden, model.embedding)
    assert nats.dtype == full.dtype == torch.float32
    assert torch.equal(nats, loss(model, hidden.float(), targets))
    assert torch.equal(full, model.softmax.log_probs(hidden.float(), model.embedding))
    wide = copy.deepcopy(model).double()
    assert_close(nats.double(), loss(wide, hidden.double(), targets), rounding(torch.float32, 64 + 100))


def test_losses_start_near_those_of_a_uniform_guess() -> None:
    """At initialization logits have about unit variance, so the loss is near ln V."""
    model = AllAttentionLM(small_config(vocabulary_size=1000, width=64, cutoffs=[100, 400])).eval()
    full = model.softmax.log_probs(torch.randn(50, 64), model.embedding)
    # Head of 102, bands of 300 and 600; E[-log p] of a normal logit of variance 1 exceeds ln(size) by 1/2.
    for words, size in ((slice(0, 100), 102), (slice(100, 400), 102 * 300), (slice(400, 1000), 102 * 600)):
        assert math.log(size) - 0.5 < -full[:, words].mean() < math.log(size) + 2


@pytest.mark.parametrize("cutoffs", [[40, 10], [10, 10], [0, 10], [-5, 10], [10, 100], [10, 200], [100]])
def test_refused_cutoffs(cutoffs: list[int]) -> None:
    """C11: not increasing, not positive, or the last not below V."""
    with pytest.raises(InputError, match="cutoffs"):
        AllAttentionLM(small_config(vocabulary_size=100, cutoffs=cutoffs))
