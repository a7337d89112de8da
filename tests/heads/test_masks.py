"""Masks of heads: thresholds by hand, zeroed Z against zeroed weights, and sequences masked one by one."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.hand_made import HandMade, row_alone, rows_of
from torch import Tensor

from allattn.heads.all_attention import OwnModel
from allattn.heads.masks import DynamicMask, StaticMask, threshold
from allattn.heads.scores import sequence_scores
from allattn.heads.watched import Batch, Visitor
from allattn.model.language_model import AllAttentionLM


@pytest.mark.parametrize(
    ("score", "share", "tau"),
    [
        ("ahon", 0.0, 1.0),
        ("ahon", 0.25, 2.0),
        ("ahon", 0.3, 2.2),  # place 0.3 * 4 = 1.2 between the second and the third
        ("ahon", 0.6, 3 + 0.4 * 7),
        ("awft", 0.0, 20.0),
        ("awft", 0.25, 10.0),
        ("awft", 0.3, 3 + 0.8 * 7),  # place 0.7 * 4 = 2.8
    ],
)
def test_thresholds_by_hand(score: str, share: float, tau: float) -> None:
    """Of 1, 2, 3, 10, 20, in tensors of two shapes."""
    values = [torch.tensor([[20.0], [1.0]]), torch.empty(2, 0), torch.tensor([[3.0, 10.0, 2.0]])]
    assert threshold(score, values, share) == pytest.approx(tau, rel=1e-12)


GATES = [torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.0, 1, 1, 1])]


def test_zeroing_z_is_zeroing_the_block() -> None:
    model, batch = HandMade(), rows_of(6, 3, left=True)
    mask = StaticMask(GATES)
    assert mask.share == 3 / 8
    with model.watch(mask):
        masked, _ = model.nats(batch)
    dense, _ = model.nats(batch)
    for layer, gate in zip(model.layers, GATES, strict=True):
        layer.blocks[gate == 0] = 0
    expected, _ = model.nats(batch)
    torch.testing.assert_close(masked, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(masked, dense, atol=1e-3)


@pytest.mark.parametrize("family", [{}, {"persistent_vectors": 0, "feed_forward": 24}], ids=["all", "xl"])
def test_zeroing_z_of_our_models(random_model: Callable[..., AllAttentionLM], family: dict[str, int]) -> None:
    """Cut ones with a scale too, over two segments with memory."""
    kept, scale = [[0, 2, 3, 5], [], [1, 2, 6, 7]], [2.0, 8.0, 2.0]
    model = random_model(torch.float64, layers=3, heads_kept=kept, output_scale=scale, **family)
    gates = [GATES[0], torch.empty(0), GATES[1]]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer, gate in zip(other.stack, gates, strict=True):
            layer.output.weight *= gate.repeat_interleave(layer.head_width).double()
        mask = StaticMask(gates)
        with OwnModel(model).watch(mask):
            masked = read(OwnModel(model))
        torch.testing.assert_close(masked, read(OwnModel(other)), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(masked, read(OwnModel(model)), atol=1e-3)
    assert mask.share == 3 / 8


def read(model: OwnModel) -> Tensor:
    """Nats of two segments of the same rows."""
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(4))
    memory, found = None, []
    for begin in (0, 5):
        segment = ids[:, begin : begin + 5], ids[:, begin + 1 : begin + 6]
        nats, memory = model.nats(Batch(*segment, torch.ones_like(segment[0], dtype=torch.bool)), memory)
        found.append(nats)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("score", ["ahon_ln", "awft", "circuit_ahon", "aeqd_ln", "lthon_hn"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_every_sequence_loses_the_heads_that_its_own_scores_say(score: str, left: bool) -> None:
    """Row by row and layer by layer with static masks: later scores are of what the earlier layers left."""
    model, batch = HandMade(heads=[4, 4, 4]), rows_of(6, 3, 0, 5, left=left)
    values = sequence_scores(model, [batch], [score])[score]
    tau = threshold(score, values, 0.3)
    mask = DynamicMask(model.layers, score, tau)
    with model.watch(mask):
        masked, _ = model.nats(batch)
    zeroed = 0
    chosen = set()
    for row in (0, 1, 3):
        alone, gates = row_alone(batch, row), [torch.ones(4) for _ in model.layers]
        for layer in range(3):
            with model.watch(StaticMask(gates)):
                own = sequence_scores(model, [alone], [score])[score][layer][0]
            gates[layer] = (own <= tau if score == "awft" else own >= tau).float()
        with model.watch(StaticMask(gates)):
            expected, _ = model.nats(alone)
        torch.testing.assert_close(masked[row, batch.real[row]], expected[0], rtol=1e-10, atol=1e-10)
        zeroed += sum(int((gate == 0).sum()) for gate in gates)
        chosen.add(str(gates))
    assert zeroed > 0
    assert len(chosen) > 1, "sequences differ"
    assert mask.share == pytest.approx(zeroed / 36, rel=1e-6), "padding alone is no sequence"


def test_a_share_of_nothing_zeroes_nothing() -> None:
    model, batch = HandMade(), rows_of(6, 3)
    for score in ("ahon_ln", "awft"):
        values = sequence_scores(model, [batch], [score])[score]
        mask = DynamicMask(model.layers, score, threshold(score, values, 0.0))
        with model.watch(mask):
            masked, _ = model.nats(batch)
        assert torch.equal(masked, model.nats(batch)[0])
        assert mask.share == 0


def test_a_random_mask_zeroes_its_share() -> None:
    model = HandMade()
    mask = DynamicMask(model.layers, "random", 0.25, torch.Generator().manual_seed(1))
    with model.watch(mask):
        for _ in range(200):
            model.nats(rows_of(3, 2))
    assert mask.share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 3200) ** 0.5)


def test_what_a_mask_zeroes_is_zero_at_every_position() -> None:
    """Also where the padding holds no number."""
    model, seen = HandMade(), list[Tensor]()

    class Keeping(Visitor):
        def z(self, layer: int, z: Tensor) -> None:
            seen.append(z)

    broken = torch.full((2, 3, 4, 3), float("nan"))
    closed = StaticMask(GATES).z(0, broken)
    assert bool((closed[:, :, [1, 3]] == 0).all())
    with model.watch(DynamicMask(model.layers, "ahon", 1e9)), model.watch(Keeping()):
        model.nats(rows_of(3, 2))
    assert all(not z.any() for z in seen)
