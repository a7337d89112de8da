"""Scores of heads by name: of every sequence, or of a whole text.

Sandoval-Segura et al., arXiv:2504.03889: `awft`, `aeqd`, `ftvvn`, `avvn`, `lthon`, `ahon`, `circuit_ahon`;
with `_ln` divided by the layer's mean (of ahon for lthon), with `_hn` by the head's own ahon; 0 / 0 is 0.
Of a text alone: `gradient`, `magnitude`, `wanda`, `flap`.

    n sequences, h heads of a layer
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.heads import measures
from allattn.heads.reading import TextVisitor, read
from allattn.heads.text_measures import FLAP, GRADIENT, MAGNITUDE, WANDA, Gradients, Moments, Norms
from allattn.heads.watched import Attention, Batch, HeadLayer, HeadModel, Visitor

RANDOM = "random"


class Inactive(Enum):
    """Which end of a score says that a head does nothing."""

    small = "small"
    large = "large"


@dataclass(frozen=True)
class Score:
    """What is true of a score."""

    name: str
    inactive: Inactive = Inactive.small
    needs_attention: bool = False  # weights and values, not Z alone
    needs_no_memory: bool = False  # it is about the first token
    per_sequence: bool = True  # False: only a whole text has it


_OF_ATTENTION = {name: getattr(measures, name) for name in ("awft", "aeqd", "ftvvn", "avvn")}
_OF_Z = {name: getattr(measures, name) for name in ("lthon", "ahon", "circuit_ahon")}
_MASSES = {
    name: getattr(measures, name) for name in ("mass_on_memory", "mass_on_segment", "mass_on_persistent")
}
MASSES = tuple(_MASSES)  # what `sequence_scores` and `text_scores` know beside the scores


def _scores() -> dict[str, Score]:
    found = [
        Score(
            f"{name}{ending}",
            Inactive.large if name == "awft" else Inactive.small,
            needs_attention=name in _OF_ATTENTION,
            needs_no_memory=name in ("awft", "ftvvn"),
        )
        for ending in ("", "_ln")
        for name in (*_OF_ATTENTION, *_OF_Z)
    ]
    found += [Score("lthon_hn"), Score(RANDOM)]
    found += [Score(name, per_sequence=False) for name in (GRADIENT, MAGNITUDE, WANDA, FLAP)]
    return {score.name: score for score in found}


SCORES = _scores()


def importance(name: str, values: Sequence[Tensor]) -> list[Tensor]:
    """The values of a score with the sign that gives an inactive head a low number."""
    return [-layer if SCORES[name].inactive is Inactive.large else layer for layer in values]


class SequenceScoring(Visitor):
    """Takes scores in every forward pass; a subclass says in `z` what becomes of `scores`.

    Args:
        layers: of the model that is watched.
        names: of scores per sequence, or in MASSES.
        noise: a CPU generator, of the random score.
    """

    def __init__(
        self, layers: Sequence[HeadLayer], names: Iterable[str], noise: torch.Generator | None = None
    ) -> None:
        self.names = list(names)
        self.real = torch.empty(0)  # (B, T) bool of the pass that runs
        self._layers = layers
        self._noise = noise
        self._needed = {part for name in self.names for part in _parts(name)}
        self._of_attention: dict[str, Tensor] = {}  # of the layer that is being computed
        self.wants_attention = bool(self._needed & {*_OF_ATTENTION, *_MASSES})

    def begins(self, real: Tensor) -> None:
        """See `Visitor`."""
        self.real = real

    @torch.no_grad()
    def attention(self, layer: int, attention: Attention) -> None:
        """See `Visitor`.

        Raises:
            InputError: a score about the first token is taken of sequences with a memory.
        """
        if attention.memory:
            refuse_memory(self.names)
        known = _OF_ATTENTION | _MASSES
        self._of_attention = {
            name: known[name](attention, self.real) for name in self._needed if name in known
        }

    @torch.no_grad()
    def scores(self, layer: int, z: Tensor) -> dict[str, Tensor]:
        """By name (B, h), float32 or wider, from Z (B, T, h, dv).

        Raises:
            InputError: a score needs attention weights, and the model has shown none.
        """
        parts, self._of_attention = self._of_attention, {}
        if self.wants_attention and not parts:
            raise InputError(
                f"{', '.join(self.names)}: needs attention weights, which this forward pass lacks (as one "
                "that generates a text does not): take a score of head outputs, such as ahon_ln"
            )
        for name in self._needed & _OF_Z.keys():
            blocks = (self._layers[layer].output_blocks(),) if name == "circuit_ahon" else ()
            parts[name] = _OF_Z[name](z, self.real, *blocks)
        if RANDOM in self._needed:
            assert self._noise is not None, "the random score needs noise"
            parts[RANDOM] = torch.rand(len(z), z.shape[2], generator=self._noise).to(z.device)
        return {name: _composed(name, parts) for name in self.names}


def sequence_scores(
    model: HeadModel,
    batches: Iterable[Batch],
    names: Iterable[str],
    memory: bool = False,
    noise: torch.Generator | None = None,
) -> dict[str, list[Tensor]]:
    """Scores of every sequence, per layer (n, h) float32 on the CPU; rows of padding alone are left out.

    Args:
        model: on any device, of any precision.
        batches: read once, in order.
        names: of scores per sequence, or in MASSES.
        memory: whether it is carried from one batch to the next.
        noise: of the random score.

    Raises:
        InputError: a score about the first token is asked for with memory.
    """
    visitor = _Collecting(model.layers, names, noise)
    if memory:
        refuse_memory(visitor.names)
    with torch.no_grad():
        read(model, batches, [visitor], memory)
    return visitor.found()


def text_scores(
    model: HeadModel,
    batches: Iterable[Batch],
    names: Iterable[str],
    memory: bool = False,
    noise: torch.Generator | None = None,
) -> dict[str, list[Tensor]]:
    """Scores of a whole text, per layer (h,) on the CPU; those per sequence are means over the sequences.

    Arguments as of `sequence_scores`; any score. The random one reads nothing.

    Raises:
        InputError: a score about the first token is asked for with memory.
    """
    names = list(names)
    if memory:
        refuse_memory(names)
    of_sequences = [name for name in names if name != RANDOM and name not in _OF_TEXT]
    collecting = _Collecting(model.layers, of_sequences)
    reading = {
        kind: kind(model.layers) for kind in dict.fromkeys(_OF_TEXT[n] for n in names if n in _OF_TEXT)
    }
    visitors: list[TextVisitor] = [*([collecting] if of_sequences else []), *reading.values()]
    if visitors:
        with torch.set_grad_enabled(Gradients in reading):
            read(model, batches, visitors, memory)
    found = {name: [layer.mean(dim=0) for layer in layers] for name, layers in collecting.found().items()}
    for name in names:
        if name in _OF_TEXT:
            found[name] = reading[_OF_TEXT[name]].scores(name)
        elif name == RANDOM:
            found[name] = [torch.rand(layer.heads, generator=noise) for layer in model.layers]
    return {name: found[name] for name in names}


_OF_TEXT: dict[str, type[Gradients] | type[Norms] | type[Moments]] = {
    GRADIENT: Gradients,
    MAGNITUDE: Norms,
    WANDA: Moments,
    FLAP: Moments,
}


class _Collecting(SequenceScoring, TextVisitor):
    """Keeps the scores of all sequences."""

    def __init__(
        self, layers: Sequence[HeadLayer], names: Iterable[str], noise: torch.Generator | None = None
    ) -> None:
        super().__init__(layers, names, noise)
        self._heads = [layer.heads for layer in layers]
        self._found: dict[str, list[list[Tensor]]] = {name: [[] for _ in layers] for name in self.names}
        self._rows: list[Tensor] = []  # (B,) bool of each batch: whether there is more than padding

    def reads(self, batch: Batch) -> None:
        self._rows.append(batch.real.any(dim=1))

    def z(self, layer: int, z: Tensor) -> None:
        for name, values in self.scores(layer, z).items():
            self._found[name][layer].append(values.float())

    def found(self) -> dict[str, list[Tensor]]:
        rows = torch.cat([torch.empty(0, dtype=torch.bool), *self._rows])
        nothing = [torch.empty(len(rows), heads) for heads in self._heads]  # of layers that nobody visited
        return {
            name: [
                (torch.cat(parts).cpu() if parts else empty)[rows]
                for parts, empty in zip(layers, nothing, strict=True)
            ]
            for name, layers in self._found.items()
        }


def _parts(name: str) -> tuple[str, ...]:
    """What is measured for a score: its numerator and, where it is a ratio, its denominator."""
    stem, _, ending = name.rpartition("_")
    if ending not in ("ln", "hn"):
        return (name,)
    return stem, "ahon" if stem == "lthon" else stem


def _composed(name: str, parts: dict[str, Tensor]) -> Tensor:
    """(B, h) of a score."""
    numerator, *rest = (parts[part] for part in _parts(name))
    if not rest:
        return numerator
    (by,) = rest
    if name.endswith("_ln"):
        by = by.mean(dim=1, keepdim=True)
    return numerator / by.clamp(min=torch.finfo(by.dtype).tiny)


def refuse_memory(names: Iterable[str]) -> None:
    """Refuse scores that have no meaning where sequences carry a memory.

    Raises:
        InputError: names the first one.
    """
    for name in names:
        if name in SCORES and SCORES[name].needs_no_memory:
            raise InputError(
                f"{name}: is about the first token of a text, and a sequence that carries a memory has none: "
                "leave it out, or read every sequence without memory"
            )
