"""A text read under visitors that are told of every batch."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from torch import Tensor

from allattn.heads.watched import Batch, HeadModel, Visitor


class TextVisitor(Visitor):
    """A visitor that is told where a batch begins and what came out."""

    def reads(self, batch: Batch) -> None:
        """The next forward pass is of `batch`."""

    def has_read(self, nats: Tensor) -> None:
        """The pass is over; `nats` (B, T) of its targets."""


def read(model: HeadModel, batches: Iterable[Batch], visitors: Sequence[TextVisitor], memory: bool) -> None:
    """Every batch once, in order.

    Args:
        model: to read with.
        batches: a text.
        visitors: what watches, in order.
        memory: whether it is carried from one batch to the next.
    """
    before = None
    with ExitStack() as stack:
        for visitor in visitors:
            stack.enter_context(model.watch(visitor))
        for batch in batches:
            for visitor in visitors:
                visitor.reads(batch)
            nats, after = model.nats(batch, before)
            for visitor in visitors:
                visitor.has_read(nats)
            before = after if memory else None
