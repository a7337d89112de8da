"""Which heads go: the lowest of a ranking, in units that a form allows.

h query heads and g key/value heads of a layer
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.heads.ranking import Scope, keep_highest
from allattn.training.foreign_settings import Form, Unit


def lowest(
    importance: Sequence[Tensor], groups: Sequence[int], heads: int, form: Form, unit: Unit
) -> list[Tensor]:
    """0/1 gates, one (h,) vector per layer, that close `heads` heads of lowest importance.

    A unit's importance is the mean of its heads'. Where a unit takes one head of every group, the j-th unit
    of a layer has the j-th lowest of each.

    Args:
        importance: per layer (h,).
        groups: g of every layer.
        heads: how many query heads go, over all layers.
        form: that the model will have.
        unit: what goes at a time.

    Raises:
        InputError: so many heads cannot go in such units.
    """
    total = sum(map(len, importance))
    if not 0 < heads < total:
        raise InputError(f"heads={heads}: give a number of the model's {total} heads, from 1 to {total - 1}")
    if unit is Unit.auto:
        unit = Unit.head if form is Form.masked else Unit.group
    any_head = unit is Unit.head and form is Form.masked
    units = [
        _units(layer, g, unit, any_head) for layer, g in zip(importance, groups, strict=True)
    ]  # of every layer (units, heads of a unit)
    (size, layers) = _checked(heads, units, form, unit)
    gone = heads // size
    ranking = [layer[places].mean(dim=1) for layer, places in zip(importance, units, strict=True)]
    if form is Form.uniform:
        kept = [keep_highest([layer], len(layer) - gone // layers, Scope.all_layers)[0] for layer in ranking]
    else:
        kept = keep_highest(ranking, sum(map(len, ranking)) - gone, Scope.all_layers)
    return [
        torch.zeros(len(layer)).index_put_((places[gate == 1].flatten(),), torch.ones(()))
        for layer, places, gate in zip(importance, units, kept, strict=True)
    ]


def _units(importance: Tensor, groups: int, unit: Unit, any_head: bool) -> Tensor:
    """(units, heads of a unit): places of the heads of every unit."""
    heads = torch.arange(len(importance))
    if any_head or not len(heads):
        return heads.unsqueeze(1)
    by_group = heads.unflatten(0, (groups, -1))  # (g, h / g)
    if unit is Unit.group:
        return by_group
    order = importance[by_group].argsort(dim=1, stable=True)
    return by_group.gather(1, order).T


def _checked(heads: int, units: Sequence[Tensor], form: Form, unit: Unit) -> tuple[int, int]:
    """Heads of a unit, and layers that have heads.

    Raises:
        InputError: `heads` are no whole number of units, or not the same in every layer.
    """
    present = [places for places in units if len(places)]
    sizes = sorted({places.shape[1] for places in present})
    whole = "a whole key/value group" if unit is Unit.group else "one head of every key/value group"
    if len(sizes) > 1:
        raise InputError(
            f"unit={unit.value}: {whole} has {sizes[0]} heads in one layer and {sizes[-1]} in another; give "
            "form=masked"
        )
    (size,) = sizes
    if heads % size:
        raise InputError(
            f"heads={heads}: {whole}, {size} heads, goes at a time: give a multiple of {size}, or form=masked"
        )
    if form is Form.uniform and heads % (size * len(present)):
        raise InputError(
            f"heads={heads}: form=uniform takes equally many from each of {len(present)} layers, {size} at a "
            f"time: give a multiple of {size * len(present)}, or another form"
        )
    return size, len(present)
