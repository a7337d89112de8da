"""Gates on models of transformers: nothing changes while all are open, and what is cut is what was closed."""

from itertools import pairwise

import pytest
import torch
from support.tiny_networks import CUTTABLE, KINDS, gated, network
from torch import Tensor

from allattn.errors import InputError
from allattn.families import for_removal, sizes_from_dict
from allattn.pretrained.language_model import PretrainedLM, sizes_only
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates, soft_sample
from allattn.pruning.surgery import cut_model, plan_removal

IDS = torch.randint(1, 300, (2, 11), generator=torch.Generator().manual_seed(5))
# A head of a group, a group with one head of the other, and a layer without any.
OPEN = [[1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0], [0] * 6]
# float64: products of some hundred terms of order 1, a dozen in a row.
CLOSE = {"rtol": 0.0, "atol": 1e-11}


def gates(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.tensor(layer, dtype=dtype) for layer in OPEN]


@pytest.mark.parametrize("kind", KINDS)
def test_open_gates_change_nothing(kind: str) -> None:
    model, plain = gated(kind), network(kind).double()
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
        torch.testing.assert_close(model.logits(IDS), expected, **CLOSE)
        ones = [torch.ones(6, dtype=torch.float64) for _ in range(3)]
        torch.testing.assert_close(model.logits(IDS, ones), expected, **CLOSE)
        nats, _ = model(IDS[:, :-1], IDS[:, 1:], [])
    wanted = -expected[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(nats, wanted, **CLOSE)


@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("kind", CUTTABLE)
def test_what_is_cut_is_what_was_closed(kind: str, scaling: bool) -> None:
    model = gated(kind)
    plan = plan_removal(model.config, gates(), scaling)
    closed = [g * plan.after.scale(layer) for layer, g in enumerate(gates())]
    with torch.no_grad():
        expected = model.logits(IDS, closed)
        cut = cut_model(model, plan)
        torch.testing.assert_close(cut.logits(IDS), expected, **CLOSE)
        assert not torch.allclose(model.logits(IDS), expected, atol=1e-3)
        # Once more, of the cut model: positions are now among the heads that are left.
        fewer = [torch.tensor([0.0, 1, 1, 1, 1]), torch.tensor([1.0]), torch.zeros(0)]
        again = plan_removal(cut.config, [g.double() for g in fewer], False)
        narrow = cut.logits(IDS, [g.double() * cut.config.scale(i) for i, g in enumerate(fewer)])
        torch.testing.assert_close(cut_model(cut, again).logits(IDS), narrow, **CLOSE)
    assert sizes_from_dict(cut.config.to_dict()) == cut.config


def test_parameters_and_cache_of_a_cut_model_by_hand() -> None:
    """d = 24, dv = 4, groups of three: layer 0 loses a query head, layer 1 all but one, layer 2 all."""
    model = gated("llama")
    cut = cut_model(model, plan_removal(model.config, gates(), False))
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, cut))
    heads, groups = 1 + 5 + 6, 0 + 1 + 2  # that go
    assert before - after == 2 * 24 * 4 * (heads + groups)
    assert model.config.unit_costs(group=False) == {"parameters": 192, "cache_bytes_per_token": 0}
    assert model.config.unit_costs(group=True) == {"parameters": 4 * 192, "cache_bytes_per_token": 2 * 4 * 4}
    caches = [m.config.cache_bytes_per_token(4) for m in (model, cut)]
    assert caches == [3 * 2 * 2 * 4 * 4, (2 + 1 + 0) * 2 * 4 * 4]


@pytest.mark.parametrize("kind", ["olmo2", "llama"])
def test_masked_heads_stay_closed(kind: str) -> None:
    """Zeroing Z is zeroing the head's columns of WO; a later removal among those that are left too."""
    model = gated(kind)
    masked = PretrainedLM(for_removal(model.config, masked=True), model.network)
    closed = cut_model(masked, plan_removal(masked.config, gates(), False))
    with torch.no_grad():
        found = closed.logits(IDS)
        for attention, layer in zip(model.attentions, OPEN, strict=True):
            columns = torch.tensor(layer, dtype=torch.float64).repeat_interleave(4)
            attention.projection.weight.mul_(columns)
        torch.testing.assert_close(found, model.network(input_ids=IDS).logits, **CLOSE)


def test_removal_under_a_joint_norm_is_refused() -> None:
    with pytest.raises(InputError, match=r"olmo2 normalizes .*gates\.removal=masked"):
        for_removal(gated("olmo2").config, masked=False)


@pytest.mark.parametrize(("kind", "share"), [("llama", 1), ("llama", 3), ("gpt2", 1)])
def test_gradients_of_pi(kind: str, share: int) -> None:
    """Of the loss by its gate at the hard gates, times that of the soft gate by pi, both by differences."""
    model, config = gated(kind), GatesConfig(output_scaling=False, beta=0.7)
    heads = HeadGates(config, [6] * 3, 6, [1.0] * 3, share).double()
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for pi in heads.pi:
            pi.uniform_(-1, 1, generator=noise)
    state = noise.get_state()
    drawn = heads.sample(noise)
    assert 0 < sum(float(layer.detach().sum()) for layer in drawn) < 18

    def loss(multipliers: list[Tensor]) -> Tensor:
        return model(IDS[:, :-1], IDS[:, 1:], [], multipliers)[0].mean()

    loss(heads.multipliers(drawn)).backward()
    noise.set_state(state)
    count = 18 // share
    u = torch.rand(count, generator=noise, dtype=torch.float64).split([6 // share] * 3)
    step = 1e-3
    hard = [layer.detach() for layer in drawn]
    for layer, pi in enumerate(heads.pi):
        assert pi.grad is not None
        for gate in range(6 // share):
            ends = []
            for side in (-step, step):
                moved = [g.clone() for g in hard]
                moved[layer][gate * share : (gate + 1) * share] += side
                with torch.no_grad():
                    ends.append(float(loss(moved)))
            soft = [float(soft_sample(pi.detach() + side, u[layer], config)[gate]) for side in (-step, step)]
            (by_gate,), (by_pi,) = ([b - a for a, b in pairwise(pair)] for pair in (ends, soft))
            # Central differences: error of order step^2, and rounding of a Llama's norms, which compute in
            # float32 whatever the model's precision is.
            rounding = 4 * torch.finfo(torch.float32).eps * ends[0] / (2 * step)
            assert float(pi.grad[gate]) == pytest.approx(
                by_gate * by_pi / (2 * step) ** 2, rel=10 * step**2, abs=rounding * by_pi / (2 * step)
            )


def test_tied_tables_stay_tied() -> None:
    model = gated("llama", torch.float32)
    assert model.network.lm_head.weight is model.network.model.embed_tokens.weight
    for one in (model, sizes_only(model.config)):
        assert sum("embed" in name or "lm_head" in name for name, _ in one.named_parameters()) == 1
