"""Reading WO against numbers worked by hand."""

import math

import pytest
import torch

from allattn.heads.output_projection import (
    block_norms,
    cancellation,
    column_view,
    contributions,
    cosines,
    effective_ranks,
    kurtosis,
    random_rotation,
    row_view,
    shares_of_output,
)


@pytest.mark.parametrize(
    ("z", "wo", "y"),
    [
        ([2.0, -1.0], [[1.0, 3.0], [2.0, 0.0]], [0.0, 6.0]),
        ([0.592, -1.279], [[1.0, 0.5], [-1.0, 2.0]], [1.871, -2.262]),
    ],
)
def test_heads_of_width_one_sum_to_the_output(z: list[float], wo: list[list[float]], y: list[float]) -> None:
    blocks = torch.tensor(wo).unsqueeze(1)  # two heads of one row each
    found = contributions(torch.tensor(z).unsqueeze(1), blocks).sum(0)
    torch.testing.assert_close(found, torch.tensor(y))


def test_what_each_head_gives_to_one_column() -> None:
    z = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0]])
    column = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.8, 0.1]).view(3, 2, 1)
    found = contributions(z, column).squeeze(-1)
    torch.testing.assert_close(found, torch.tensor([1.5, 0.0, 4.4]))
    assert float(found.sum()) == pytest.approx(5.9)
    torch.testing.assert_close(column_view(column).squeeze(1), torch.tensor([0.5, 0.2, math.sqrt(0.65)]))


def test_norms_and_ranks_of_blocks() -> None:
    blocks = torch.zeros(4, 2, 3)
    blocks[0] = torch.tensor([[3.0, 0, 0], [0, 3.0, 0]])  # two equal singular values
    blocks[1] = torch.tensor([[3.0, 4.0, 0], [6.0, 8.0, 0]])  # one direction
    blocks[2] = torch.tensor([[3.0, 0, 0], [0, 1.0, 0]])  # shares 3/4 and 1/4
    torch.testing.assert_close(block_norms(blocks), torch.tensor([18, 125, 10, 0.0]).sqrt())
    mixed = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    torch.testing.assert_close(effective_ranks(blocks), torch.tensor([2.0, 1.0, mixed, 0.0]))
    torch.testing.assert_close(row_view(blocks)[1], torch.tensor([5.0, 10.0]))


def test_heads_that_agree_cancel_or_stand_aside() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([-4.0, 3.0])
    written = torch.stack(
        [torch.stack(pair) for pair in ((one, one), (one, -0.5 * one), (one, other))]
    )  # (3 positions, 2 heads, 2)
    torch.testing.assert_close(cancellation(written), torch.tensor([1.0, 1 / 3, math.sqrt(0.5)]))
    torch.testing.assert_close(shares_of_output(written), torch.tensor([[0.5, 0.5], [2.0, -1.0], [0.5, 0.5]]))
    torch.testing.assert_close(
        cosines(torch.stack([one, other, -2 * one])),
        torch.tensor([[1.0, 0, -1], [0, 1, 0], [-1, 0, 1]]),
    )


def test_a_rotation_makes_one_large_coordinate_gaussian() -> None:
    width = 256
    spike = torch.zeros(1, width)
    spike[0, 3] = 5.0
    p = 1 / width  # moments of a coordinate that is 1 with probability p
    expected = (1 - 3 * p * (1 - p)) / (p * (1 - p))
    assert float(kurtosis(spike)) == pytest.approx(expected)
    rotation = random_rotation(width, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width, dtype=torch.float64))
    rotated = float(kurtosis(spike.double() @ rotation))
    assert abs(rotated - 3) < 5 * math.sqrt(24 / width)  # five standard errors of a Gaussian sample's
