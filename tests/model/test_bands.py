"""Words counted on the CPU: the same numbers as when a device is asked where they are."""

import pytest
import torch
from support.reference import random_ids, random_model

from allattn.model.bands import BandCounts, count_bands, places


def test_counts_by_hand() -> None:
    """Bands 0..2, 3..5, 6..9; a target that is not scored is in no tail, one beyond the last band in that."""
    inputs = torch.tensor([[0, 2, 3], [5, 6, 9]])
    targets = torch.tensor([[3, 3, -100], [9, 10, 2]])
    assert count_bands(inputs, targets, [3, 6, 10]) == BandCounts([2, 2, 2], [2, 2])
    assert count_bands(inputs, targets, [10]) == BandCounts([6], [])


def test_places_do_not_depend_on_who_counts() -> None:
    inside = torch.tensor([True, False, True, True, False])
    assert places(inside, 3).tolist() == places(inside, None).tolist() == [0, 2, 3]
    assert places(~inside & inside, 0).shape == (0,)


@pytest.mark.parametrize("cutoffs", [[], [10, 20], [7]], ids=str)
def test_counted_words_change_no_number(cutoffs: list[int]) -> None:
    """Losses, memory and every gradient, bit for bit; some targets are not scored and a band may be empty."""
    model, ids = random_model(torch.float32, cutoffs=cutoffs), random_ids(3, 9)
    ids[:, 4] = 1
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100
    counts = count_bands(ids[:, :-1], targets, model.config.band_ends)
    found = []
    for known in (None, counts):
        model.zero_grad()
        nats, memory = model(ids[:, :-1], targets, model.empty_memory(3), counts=known)
        nats.sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([nats.detach(), *memory, *(x.clone() for x in gradients)])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
