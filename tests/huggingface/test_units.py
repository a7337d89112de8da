"""Which heads go, by hand."""

import pytest
import torch

from allattn.errors import InputError
from allattn.huggingface.units import lowest
from allattn.training.foreign_settings import Form, Unit

#  heads 0 1 | 2 3 | 4 5 of three groups; means by group 3, 5, 2.5 and 1.5, 6, 2
IMPORTANCE = [torch.tensor([1.0, 5, 6, 4, 2, 3]), torch.tensor([1.25, 1.75, 7, 5, 0, 4])]


@pytest.mark.parametrize(
    ("form", "unit", "heads", "closed"),
    [
        (Form.masked, Unit.auto, 3, [[0], [0, 4]]),
        (Form.masked, Unit.group, 4, [[], [0, 1, 4, 5]]),
        (Form.per_layer, Unit.auto, 6, [[4, 5], [0, 1, 4, 5]]),
        (Form.uniform, Unit.auto, 4, [[4, 5], [0, 1]]),
        (Form.per_layer, Unit.head, 3, [[], [0, 3, 4]]),  # units: means 7/3, 14/3; 6.25/3, 12.75/3
        (Form.uniform, Unit.head, 6, [[0, 3, 4], [0, 3, 4]]),
    ],
)
def test_the_lowest_go(form: Form, unit: Unit, heads: int, closed: list[list[int]]) -> None:
    gates = lowest(IMPORTANCE, [3, 3], heads, form, unit)
    assert [(gate == 0).nonzero().flatten().tolist() for gate in gates] == closed


def test_where_every_head_has_its_own_keys_a_group_is_a_head() -> None:
    gates = lowest([*IMPORTANCE, torch.zeros(0)], [6, 6, 0], 2, Form.per_layer, Unit.auto)
    assert [(gate == 0).nonzero().flatten().tolist() for gate in gates] == [[0], [4], []]


@pytest.mark.parametrize(
    ("form", "unit", "heads", "groups", "said"),
    [
        (Form.per_layer, Unit.auto, 3, [3, 3], "a whole key/value group, 2 heads, .* a multiple of 2"),
        (Form.per_layer, Unit.head, 4, [3, 3], "one head of every key/value group, 3 heads"),
        (Form.uniform, Unit.auto, 6, [3, 3], "each of 2 layers, 2 at a time: give a multiple of 4"),
        (Form.per_layer, Unit.auto, 4, [3, 2], "2 heads in one layer and 3 in another"),
        (Form.masked, Unit.auto, 0, [3, 3], "from 1 to 11"),
        (Form.masked, Unit.auto, 12, [3, 3], "from 1 to 11"),
    ],
)
def test_counts_that_do_not_fit(form: Form, unit: Unit, heads: int, groups: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        lowest(IMPORTANCE, groups, heads, form, unit)
