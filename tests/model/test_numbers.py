"""Whole models over shapes, heads, memories, dtypes and extreme numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, random_ids, random_memory, random_model, rounding, small_config
from torch import Tensor

from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig, Penalty
from allattn.pruning.gates import HeadGates, decide_gates, penalty, sample_gates
from allattn.pruning.surgery import absorb_scale, cut_model, plan_removal
from allattn.training.checkpoints import write_checkpoint
from allattn.training.loading import load_model

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("cutoffs", [[], [8, 18]], ids=["plain", "adaptive"])
def test_softmax_with_logits_of_ten_thousand(dtype: torch.dtype, size: float, cutoffs: list[int]) -> None:
    """One word takes all the probability: 0 nats for it, 1e4 for the others, and finite gradients."""
    model = AllAttentionLM(small_config(cutoffs=cutoffs)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.softmax.biases[0][3] = size
    hidden = torch.ones(1, 2, 12, dtype=dtype)
    words = torch.tensor([[3, 4]])
    with torch.no_grad():
        log_probs = model.softmax.log_probs(hidden, model.embedding)
    others = 7 + 2 if cutoffs else 29  # in the head: the first band's other words and two clusters
    nats = [0.0, 1e4] if size > 0 else [1e4 + math.log(others), math.log(others)]
    bound = rounding(dtype, 12 + 30)  # a logit sums the width, its normaliser the words
    assert log_probs.exp().sum(-1)[0].tolist() == pytest.approx([1, 1], rel=bound)
    losses = model.softmax(hidden, words, model.embedding)
    assert losses[0].tolist() == pytest.approx(nats, rel=bound, abs=bound)
    losses.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("pi", [50.0, -50.0])
@pytest.mark.parametrize("kind", Penalty, ids=str)
def test_pi_of_fifty(pi: float, kind: Penalty) -> None:
    """Surely open or closed: samples, penalty and their gradients by the formulas, and finite."""
    config = GatesConfig(penalty=kind)
    parameter = torch.full((4,), pi, dtype=torch.float32, requires_grad=True)
    noise = torch.tensor([1e-12, 0.25, 0.75, 1 - torch.finfo(torch.float32).eps])
    gates = sample_gates(parameter, noise, config)
    assert gates.tolist() == [1.0 if pi > 0 else 0.0] * 4
    assert decide_gates([parameter], None)[0].tolist() == gates.tolist()
    term = penalty(parameter, config)
    shift = 0 if kind is Penalty.hard else config.beta * math.log(-config.gamma / config.zeta)
    wanted = 4 / (1 + math.exp(-(pi - shift)))
    bound = rounding(torch.float32, 100)  # of 50 in the exponent, twice
    assert float(term.detach()) == pytest.approx(wanted, rel=bound, abs=0)
    gradient = torch.autograd.grad((gates.sum() + term), parameter)[0]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("pi", [50.0, -50.0])
def test_model_with_gates_of_fifty(pi: float) -> None:
    """Every layer keeps all of its heads, or its bias alone; a step's gradients are finite."""
    model = random_model(torch.float32)
    gates = HeadGates(GatesConfig(initial_pi=pi), [4, 4], 4, [1.0, 1.0])
    sampled = gates.sample(torch.Generator().manual_seed(0))
    ids = random_ids(2, 6)
    nats, _ = model(ids[:, :-1], ids[:, 1:], model.empty_memory(2), gates.multipliers(sampled))
    wanted = cut_model(model, plan_removal(model.config, gates.decide(), True))
    with torch.no_grad():
        cut, _ = wanted(ids[:, :-1], ids[:, 1:], wanted.empty_memory(2))
    assert_close(nats.detach(), cut, rounding(torch.float32, 2 * (2 * 12 + 30)))  # of layers and words, twice
    (nats.mean() + gates.penalty()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in [*model.parameters(), *gates.parameters()])


heads_of_a_layer = st.sets(st.integers(0, 3)).map(sorted)


@given(
    kept=st.lists(heads_of_a_layer, min_size=2, max_size=2),
    again=st.lists(st.integers(0, 15), min_size=2, max_size=2),
    tokens=st.integers(1, 6),
    memory=st.integers(0, 6),
    scaling=st.booleans(),
    cutoffs=st.sampled_from([[], [8, 18]]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_removal_equals_masking(
    kept: list[list[int]],
    again: list[int],
    tokens: int,
    memory: int,
    scaling: bool,
    cutoffs: list[int],
    seed: int,
) -> None:
    """Any heads, any memory, segments of one token too; then some of the rest, and s_g absorbed."""
    torch.manual_seed(seed)
    model = random_model(torch.float64, cutoffs=cutoffs)
    ids, before = random_ids(2, tokens), random_memory(model, 2, memory)

    def log_probs(some: AllAttentionLM, multipliers: list[Tensor] | None = None) -> Tensor:
        hidden, _ = some.hidden(ids, before, multipliers)
        return some.softmax.log_probs(hidden, some.embedding)

    def masks(heads: list[list[int]]) -> list[Tensor]:
        """s_g * g_i of a layer that keeps these heads, by hand."""
        return [
            torch.tensor([float(head in layer) for head in range(4)], dtype=torch.float64)
            * (4 / max(len(layer), 1) if scaling else 1.0)
            for layer in heads
        ]

    def gates(present: list[list[int]], heads: list[list[int]]) -> list[Tensor]:
        pairs = zip(present, heads, strict=True)
        return [torch.tensor([float(head in layer) for head in old]) for old, layer in pairs]

    with torch.no_grad():
        cut = cut_model(model, plan_removal(model.config, gates([[0, 1, 2, 3]] * 2, kept), scaling))
        torch.testing.assert_close(log_probs(cut), log_probs(model, masks(kept)), rtol=0, atol=1e-10)
        fewer = [
            [head for head in layer if bits >> head & 1] for layer, bits in zip(kept, again, strict=True)
        ]
        second = cut_model(cut, plan_removal(cut.config, gates(kept, fewer), scaling))
        torch.testing.assert_close(log_probs(second), log_probs(model, masks(fewer)), rtol=0, atol=1e-10)
        torch.testing.assert_close(log_probs(absorb_scale(second)), log_probs(second), rtol=0, atol=1e-10)


@given(
    heads=st.none() | st.lists(heads_of_a_layer, min_size=2, max_size=2),
    persistent=st.integers(0, 3),
    same_length=st.booleans(),
    cutoffs=st.sampled_from([[], [8, 18]]),
    double=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_saved_and_loaded_models_are_bitwise_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    heads: list[list[int]] | None,
    persistent: int,
    same_length: bool,
    cutoffs: list[int],
    double: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = random_model(
        torch.float64 if double else torch.float32,
        persistent_vectors=persistent,
        same_length=same_length,
        cutoffs=cutoffs,
        heads_kept=heads,
        output_scale=None if heads is None else [4 / max(len(layer), 1) for layer in heads],
    )
    entry = {"format_version": 1, "model": model.config.to_dict(), "phase": "fine_tune", "step": 1}
    entry |= {"best": 1.0, "memory": [], "data": {}, "tokenizer_hash": "", "fingerprint": ""}
    entry |= {"output_scaling": None, "target_sparsity": None}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    path = tmp_path_factory.getbasetemp() / "numbers.ckpt"
    write_checkpoint(path, {"state_dict": state, "allattn": entry})
    loaded = load_model(path).model.eval()
    assert loaded.config == model.config
    ids, memory = random_ids(3, 5), random_memory(model, 3, 4)
    with torch.no_grad():
        (found, after), (wanted, wanted_after) = (m.log_probs(ids, memory) for m in (loaded, model))
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, after, wanted_after))


@pytest.mark.parametrize("heads", [None, [[], [2]], [[], []]], ids=str)
@pytest.mark.parametrize("persistent", [0, 3])
@pytest.mark.parametrize("memory", [0, 1])
def test_sequences_of_length_one(heads: list[list[int]] | None, persistent: int, memory: int) -> None:
    """One token, with and without anything to look back on: finite values and gradients, one at a time
    as together."""
    model = random_model(torch.float64, heads_kept=heads, persistent_vectors=persistent)
    ids = random_ids(2, 4)
    state = random_memory(model, 2, memory)
    together, _ = model.log_probs(ids, state)
    one_by_one = []
    for token in ids.split(1, dim=1):
        piece, state = model.log_probs(token, state)
        one_by_one.append(piece)
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), together, rtol=0, atol=1e-10)
    nats, _ = model(ids[:, :1], ids[:, 1:2], model.empty_memory(2))
    assert nats.shape == (2, 1)
    nats.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
