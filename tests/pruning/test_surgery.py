import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, rounding
from torch import Tensor

from allattn.errors import InputError
from allattn.model.counts import count_parameters
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.pruning.surgery import RemovalPlan, absorb_scale, cut_model, plan_removal, sparsity
from allattn.training.config import OptimizerConfig, OptimizerName
from allattn.training.cutting import cut_optimizer_state
from allattn.training.optimizers import make_optimizer, parameter_groups

SIX_OF_EIGHT = [1, 0, 1, 1, 0, 1, 1, 1]
OPEN = [1] * 8
# Where the heads' blocks lie, stated independently of AllAttention.HEAD_AXIS.
FIRST_AXIS = (
    "query.weight",
    "key.weight",
    "value.weight",
    "position.weight",
    "content_bias",
    "position_bias",
)
SECOND_AXIS = ("output.weight", "persistent_keys", "persistent_values")

Models = Callable[..., AllAttentionLM]
LogProbs = Callable[..., Tensor]


def plan_for(model: AllAttentionLM, gates: list[list[int]]) -> RemovalPlan:
    return plan_removal(model.config, [torch.tensor(g, dtype=torch.float32) for g in gates], True)


def gated(model: AllAttentionLM, gates: list[list[int]]) -> list[Tensor]:
    """Multipliers of the deterministic gates whose pi has the sign that `gates` says."""
    heads = HeadGates(GatesConfig(), [len(g) for g in gates], 8, [1.0] * len(gates))
    with torch.no_grad():
        for pi, g in zip(heads.pi, gates, strict=True):
            pi.copy_(torch.tensor(g) - 0.5)
    return heads.to(model.positions.table.dtype).multipliers(heads.decide())


def blocks(name: str, tensor: Tensor, heads: list[list[int]], width: int) -> Tensor:
    """The part of a parameter that belongs to the given heads, by reshaping."""
    layer, _, local = name.removeprefix("layers.").partition(".")
    if not name.startswith("layers.") or local not in FIRST_AXIS + SECOND_AXIS:
        return tensor
    axis = 0 if local in FIRST_AXIS else 1
    split = tensor.unflatten(axis, (-1, width))
    chosen = [split.select(axis, head) for head in heads[int(layer)]]
    if not chosen:
        return tensor.narrow(axis, 0, 0)
    return torch.cat(chosen, axis)


FAMILIES: dict[str, dict[str, int]] = {
    "All-attention": {},
    "Transformer-XL": {"persistent_vectors": 0, "feed_forward": 9},
    "All-attention with feed-forward": {"feed_forward": 9},
}
CASES = {
    "six of eight everywhere": [SIX_OF_EIGHT] * 3,
    "one layer only": [SIX_OF_EIGHT, OPEN, OPEN],
    "different heads": [[0, 0, 0, 0, 0, 1, 0, 0], SIX_OF_EIGHT, [1, 1, 0, 0, 1, 1, 0, 0]],
    "no heads in one layer": [OPEN, [0] * 8, SIX_OF_EIGHT],
    "no heads at all": [[0] * 8] * 3,
    "all heads": [OPEN] * 3,
}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gates", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_cut_model_equals_the_gated_one(
    random_model: Models,
    log_probs: LogProbs,
    family: dict[str, int],
    gates: list[list[int]],
    dtype: torch.dtype,
) -> None:
    model = random_model(dtype, **family)
    cut = cut_model(model, plan_for(model, gates))
    expected = log_probs(model, gated(model, gates))
    assert cut.positions.table.dtype == dtype
    assert_close(log_probs(cut), expected, rounding(dtype, 2 * 3 * 32))  # 3 layers sum over 32 entries, twice
    kept = [[i for i, g in enumerate(layer) if g] for layer in gates]
    assert cut.config.heads_kept == kept
    assert sparsity(cut.config) == pytest.approx(1 - sum(map(len, kept)) / 24)
    if gates != CASES["all heads"]:
        assert not torch.allclose(expected, log_probs(model), atol=1e-3), "the removed heads mattered"


def test_scale_and_head_width_stay_as_they_were(random_model: Models, log_probs: LogProbs) -> None:
    model = random_model(torch.float64)
    cut = cut_model(model, plan_for(model, [SIX_OF_EIGHT] * 3))
    assert cut.config.output_scale == pytest.approx([8 / 6] * 3, rel=1e-15)
    assert [layer.scale for layer in cut.layers] == pytest.approx([8 / 6] * 3, rel=1e-15)
    assert [layer.head_width for layer in cut.layers] == [4] * 3
    assert cut.config.heads == 8
    expected = log_probs(cut)
    for layer in cut.layers:
        layer.scale = 1.0
    assert not torch.allclose(log_probs(cut), expected, atol=1e-3), "H = 6 in s_g would be another model"


@pytest.mark.numeric
def test_without_output_scaling_the_scale_is_one(random_model: Models, log_probs: LogProbs) -> None:
    model = random_model(torch.float64)
    gates = [torch.tensor(SIX_OF_EIGHT, dtype=torch.float64)] * 3
    cut = cut_model(model, plan_removal(model.config, gates, False))
    assert cut.config.output_scale == [1.0] * 3
    torch.testing.assert_close(log_probs(cut), log_probs(model, gates), rtol=0, atol=1e-12)


def test_one_layers_cut_leaves_the_other_tensors_alone(random_model: Models) -> None:
    model = random_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = cut_model(model, plan_for(model, [SIX_OF_EIGHT, OPEN, OPEN])).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after.get(name, torch.empty(0)))}
    assert changed == {f"layers.0.{name}" for name in FIRST_AXIS + SECOND_AXIS}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_cut_weights_are_the_kept_heads_blocks(random_model: Models) -> None:
    model = random_model()
    plan = plan_for(model, CASES["different heads"])
    cut, kept = cut_model(model, plan), plan.after.heads_kept
    assert kept is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(cut.state_dict()[name], blocks(name, tensor, kept, 4)), name


def test_plan_says_what_goes(random_model: Models) -> None:
    model = random_model()
    plan = plan_for(model, [SIX_OF_EIGHT, OPEN, [0] * 8])
    assert plan.removed == [[1, 4], [], list(range(8))]
    assert str(plan).splitlines() == [
        "remove 10 of 24 heads",
        "  layer 0: heads 1, 4",
        "  layer 2: heads 0, 1, 2, 3, 4, 5, 6, 7",
    ]
    assert model.config.heads_kept is None, "the plan does not touch the configuration it was made from"


@pytest.mark.numeric
def test_second_cut_keeps_the_original_indices(random_model: Models, log_probs: LogProbs) -> None:
    model = random_model(torch.float64)
    once = cut_model(model, plan_for(model, [SIX_OF_EIGHT, [0] * 8, OPEN]))
    second = plan_for(once, [[0, 1, 1, 0, 1, 1], [], [1, 1, 1, 1, 0, 0, 0, 0]])
    assert second.removed == [[0, 5], [], [4, 5, 6, 7]]
    twice = cut_model(once, second)
    assert twice.config.heads_kept == [[2, 3, 6, 7], [], [0, 1, 2, 3]]
    assert twice.config.output_scale == [2.0, 8.0, 2.0]
    direct = [[0, 0, 1, 1, 0, 0, 1, 1], [0] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]
    torch.testing.assert_close(log_probs(twice), log_probs(model, gated(model, direct)), rtol=0, atol=1e-12)


@pytest.mark.numeric
@pytest.mark.parametrize("gates", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_absorbed_scale_gives_the_same_logits(
    random_model: Models, log_probs: LogProbs, family: dict[str, int], gates: list[list[int]]
) -> None:
    model = random_model(torch.float64, **family)
    cut = cut_model(model, plan_for(model, gates))
    absorbed = absorb_scale(cut)
    torch.testing.assert_close(log_probs(absorbed), log_probs(cut), rtol=0, atol=1e-12)
    assert absorbed.config.scale_absorbed
    assert all(layer.scale == 1 for layer in absorbed.layers)
    for name, tensor in cut.state_dict().items():
        assert torch.equal(absorbed.state_dict()[name], tensor) or name.endswith("output.weight"), name
    with pytest.raises(InputError, match="absorbed into WO"):
        plan_for(absorbed, [[1] * len(layer.heads_kept) for layer in absorbed.layers])


@pytest.mark.parametrize(
    "gates", [[[1] * 7] + [OPEN] * 2, [[1, 0.5] + [1] * 6] + [OPEN] * 2, [[2] * 8] + [OPEN] * 2]
)
def test_gates_that_do_not_fit_are_refused(random_model: Models, gates: list[list[Any]]) -> None:
    with pytest.raises(InputError, match="layer 0 has 8 heads"):
        plan_for(random_model(), gates)


def test_gates_of_too_few_layers_are_refused(random_model: Models) -> None:
    with pytest.raises(InputError):
        plan_for(random_model(), [OPEN] * 2)


def test_parameters_removed_with_two_heads_of_each_layer(random_model: Models) -> None:
    """d=64, 8 heads of 8, N=16: 2,304 a head in WQ, WK, WV, WO, PK, PV; 512 + 16 in WR, u, v."""
    model = random_model(width=64, persistent_vectors=16, layers=2)
    cut = cut_model(model, plan_for(model, [SIX_OF_EIGHT] * 2))
    sizes = [{name: p.numel() for name, p in m.named_parameters()} for m in (model, cut)]
    gone = {name: size - sizes[1][name] for name, size in sizes[0].items() if size != sizes[1][name]}
    named_by_paper = ("query", "key", "value", "output", "persistent")
    listed = sum(n for name, n in gone.items() if name.split(".")[2].startswith(named_by_paper))
    assert listed == 9_216
    assert sum(gone.values()) - listed == 4 * (512 + 16)
    before, after = count_parameters(model), count_parameters(cut)
    assert before.layers - after.layers == before.total - after.total == 9_216 + 4 * 528
    assert model.config.parameters_per_head == 2_304 + 528
    assert sparsity(cut.config) == 0.25


layer_gates = st.lists(st.integers(0, 1), min_size=8, max_size=8)


@pytest.mark.numeric
@settings(max_examples=30, deadline=None)
@given(gates=st.lists(layer_gates, min_size=3, max_size=3))
def test_any_set_of_heads_can_go(random_model: Models, log_probs: LogProbs, gates: list[list[int]]) -> None:
    model = random_model(torch.float64)
    cut = cut_model(model, plan_for(model, gates))
    expected = log_probs(model, gated(model, gates))
    torch.testing.assert_close(log_probs(cut), expected, rtol=0, atol=1e-12)
    removed = sum(row.count(0) for row in gates)
    assert (
        count_parameters(model).total - count_parameters(cut).total
        == removed * model.config.parameters_per_head
    )


@pytest.mark.parametrize("gates", list(CASES.values()), ids=CASES)
@pytest.mark.parametrize("name", OptimizerName, ids=str)
@pytest.mark.parametrize("family", ["All-attention", "Transformer-XL"])
def test_moments_are_cut_like_their_parameters(
    random_model: Models, family: str, name: OptimizerName, gates: list[list[int]]
) -> None:
    config = OptimizerConfig(name=name, weight_decay=0.1, learning_rate=1e-3)
    model = random_model(**FAMILIES[family])
    heads = HeadGates(GatesConfig(), [8] * 3, 8, [1.0] * 3)
    optimizer = make_optimizer(parameter_groups(model, heads, config, 10.0), config)
    noise = torch.Generator().manual_seed(5)
    for _ in range(3):
        for weight in (*model.parameters(), *heads.parameters()):
            weight.grad = torch.randn(weight.shape, generator=noise)
        optimizer.step()
    plan = plan_for(model, gates)
    kept = plan.after.heads_kept
    assert kept is not None
    state = cut_optimizer_state(optimizer.state_dict(), plan)
    assert "gates" not in [group["name"] for group in state["param_groups"]]
    cut = cut_model(model, plan)
    fresh = make_optimizer(parameter_groups(cut, None, config), config)
    fresh.load_state_dict(state)
    originals, trained = dict(model.named_parameters()), {}
    for group in fresh.param_groups:
        trained |= dict(zip(group["param_names"], group["params"], strict=True))
        assert group.get("step", 3) == 3
    assert trained.keys() == {n for n, p in cut.named_parameters() if p.requires_grad}
    for parameter_name, parameter in trained.items():
        old, new = optimizer.state[originals[parameter_name]], fresh.state[parameter]
        assert old
        assert old.keys() == new.keys()
        for key, value in old.items():
            if torch.is_tensor(value) and value.ndim:
                assert torch.equal(new[key], blocks(parameter_name, value, kept, 4)), (parameter_name, key)
            else:
                assert new[key] == value


def test_next_step_of_the_cut_model_is_the_uncut_ones(random_model: Models) -> None:
    """AdamW works on each element alone, so removing heads must not change the others' updates."""
    config = OptimizerConfig(name=OptimizerName.adamw, learning_rate=1e-2, weight_decay=0.1)
    model = random_model(torch.float64)
    optimizer = make_optimizer(parameter_groups(model, None, config), config)
    noise = torch.Generator().manual_seed(5)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        optimizer.step()

    step()
    plan = plan_for(model, CASES["no heads in one layer"])
    kept = plan.after.heads_kept
    assert kept is not None
    cut = cut_model(model, plan)
    fresh = make_optimizer(parameter_groups(cut, None, config), config)
    state = copy.deepcopy(optimizer.state_dict())  # the step counts would be shared otherwise
    fresh.load_state_dict(cut_optimizer_state(state, plan))
    step()
    originals = dict(model.named_parameters())
    for name, parameter in cut.named_parameters():
        gradient = originals[name].grad
        assert gradient is not None
        parameter.grad = blocks(name, gradient, kept, 4).clone()
    fresh.step()
    for name, parameter in cut.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), blocks(name, originals[name].detach(), kept, 4))
        else:
            assert name.startswith("layers.1."), "only a layer without heads is no longer trained"
