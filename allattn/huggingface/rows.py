"""A batch of texts of different lengths, read together: each row gets the numbers that it gets alone.

Padding is taken out before the layers: a row's real tokens come first, whatever side the padding was on, and
no real token sees what comes after it. What is kept of a text is the model's segment memory. Rows that have
less than a full memory are kept in groups of equal length, since each sees another number of positions.

    B rows, n of them in a group, T tokens, m <= M positions kept, L layers, d width
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from allattn.model.cache import Cache, from_memory, step
from allattn.model.language_model import AllAttentionLM, Memory


@dataclass(frozen=True)
class Group:
    """Rows that have read equally much."""

    places: Tensor  # (n,) int64, their rows in the batch, rising
    memory: Memory  # L tensors (n, m, d); empty once there are `words`
    words: Cache | None = None  # the same as keys and values, where tokens came one by one

    def select(self, places: Tensor, rows: Tensor) -> "Group":
        """The rows `rows` (k,) of the group as a group whose places are `places`."""
        if self.words is not None:
            return Group(places, [], self.words.select(rows))
        return Group(places, [layer[rows] for layer in self.memory])


class AllAttentionCache:
    """What a batch keeps between calls, in the role of transformers' `Cache`."""

    is_compileable = False
    is_croppable = False  # a full memory has let go of the oldest position
    is_linear: ClassVar[list[bool]] = [False]  # each token is given once

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.seen = 0  # tokens of each row, padding included

    def get_seq_length(self, layer: int = 0) -> int:
        """How many tokens were given, padding included."""
        return self.seen

    def reorder_cache(self, beams: Tensor) -> None:
        """Row r becomes what row beams[r] was; both have read equally much, as the beams of one text."""
        self.groups = [
            group.select(group.places, torch.searchsorted(group.places, beams[group.places]))
            for group in self.groups
        ]


def nothing_read(model: AllAttentionLM, rows: int) -> list[Group]:
    """The groups at the start of `rows` texts."""
    return [Group(torch.arange(rows, device=model.device), model.empty_memory(rows))]


def read_rows(
    model: AllAttentionLM, ids: Tensor, real: Tensor | None, groups: Sequence[Group], keep: bool
) -> tuple[Tensor, list[Group]]:
    """Outputs of the last layer for the next tokens of every row.

    A token sees itself and the M positions before it in every layer, also in a model that was trained to see
    up to a segment more (same_length=False).

    Args:
        model: in training mode or not.
        ids: (B, T) int64.
        real: (B, T) bool, False = padding; None = there is none.
        groups: what was read before.
        keep: whether more will be read.

    Returns:
        (B, T, d), anything finite where there is padding; the groups afterwards, none where not `keep`.
    """
    # Keys and values are kept as numbers, so they serve where no gradient is wanted.
    one_by_one = keep and ids.shape[1] == 1 and not model.training and not torch.is_grad_enabled()
    outputs, after = [], []
    for group in groups:
        alone = len(groups) == 1
        own = ids if alone else ids[group.places]
        own_real = real if real is None or alone else real[group.places]
        if one_by_one or group.words is not None:
            hidden, new = _word_by_word(model, own, own_real, group)
        else:
            hidden, new = _at_once(model, own, own_real, group, keep)
        outputs.append(hidden)
        after += new
    if len(groups) == 1:
        return outputs[0], after
    order = torch.cat([group.places for group in groups]).argsort()
    return torch.cat(outputs)[order], after


def _at_once(
    model: AllAttentionLM, ids: Tensor, real: Tensor | None, group: Group, keep: bool
) -> tuple[Tensor, list[Group]]:
    length, before = model.config.memory_length, group.memory[0].shape[1]
    padded = real is not None and not bool(real.all())
    packed = ids
    if padded:
        assert real is not None
        order = (~real).int().argsort(dim=1, stable=True)  # real tokens first
        packed = ids.gather(1, order)[:, : max(1, int(real.sum(dim=1).max()))]
    keys = before + packed.shape[1]
    kept = (keys if padded else length) if keep else 0
    positions = model.positions(keys, length)
    x, after = model.through_layers(
        model.embedding(packed), group.memory, positions, length, memory_length=kept
    )
    hidden = model.output_dropout(x)
    if not padded:
        return hidden, [Group(group.places, after)] if keep else []
    assert real is not None
    place = (real.cumsum(dim=1) - 1).clamp(min=0)  # (n, T) of each token among the real ones
    hidden = _pick(hidden, place)
    return hidden, _by_length(after, before + real.sum(dim=1), length, group) if keep else []


def _by_length(layers: Memory, ends: Tensor, length: int, group: Group) -> list[Group]:
    """The last M of the first `ends` (n,) positions of each row, as groups of as many positions."""
    groups = []
    sizes = ends.clamp(max=length)
    for size in sizes.unique().tolist():
        rows = (sizes == size).nonzero().squeeze(1)
        place = (ends[rows] - size).unsqueeze(1) + torch.arange(size, device=ends.device)  # (k, size)
        groups.append(Group(group.places[rows], [_pick(layer[rows], place) for layer in layers]))
    return groups


def _pick(x: Tensor, place: Tensor) -> Tensor:
    """(n, S, d) and (n, T) -> (n, T, d)."""
    return x.gather(1, place.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _word_by_word(
    model: AllAttentionLM, ids: Tensor, real: Tensor | None, group: Group
) -> tuple[Tensor, list[Group]]:
    kept = group.words or from_memory(model, group.memory)
    if real is None or bool(real.all()):
        steps = [step(model, column, kept) for column in ids.unbind(1)]
        return torch.stack(steps, dim=1), [Group(group.places, [], kept)]
    outputs = []
    parts = [Group(torch.arange(len(ids), device=ids.device), [], kept)]  # places inside the group
    for column, reads in zip(ids.unbind(1), real.unbind(1), strict=True):
        parts = [part for whole in parts for part in _split(whole, reads)]
        output = torch.zeros(len(ids), model.config.width, dtype=model.dtype, device=ids.device)
        for part in parts:
            if bool(reads[part.places[0]]):
                assert part.words is not None
                output[part.places] = step(model, column[part.places], part.words)
        outputs.append(output)
    return torch.stack(outputs, dim=1), [Group(group.places[p.places], [], p.words) for p in parts]


def _split(group: Group, reads: Tensor) -> list[Group]:
    """The rows of a group that read the next token, and those for which it is padding."""
    own = reads[group.places]
    if bool(own.all()) or not bool(own.any()):
        return [group]
    sides = [side.nonzero().squeeze(1) for side in (own, ~own)]
    return [group.select(group.places[rows], rows) for rows in sides]
