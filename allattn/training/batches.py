"""A text in segments as batches of sequences whose heads are watched."""

from collections.abc import Iterator

import torch

from allattn.data.segments import EvaluationStream, WindowStream
from allattn.heads.watched import Batch


def as_batches(stream: EvaluationStream | WindowStream) -> Iterator[Batch]:
    """Segments with what of them is text: a row ends after its last target."""
    if isinstance(stream, WindowStream):
        ends = torch.tensor([row.end for row in stream.windows]).split(stream.rows)
    else:
        ends = (torch.tensor([row.end for row in stream.rows]),) * len(stream)
    for segment, end in zip(stream, ends, strict=True):
        assert segment.first is not None
        places = segment.first.unsqueeze(1) + torch.arange(segment.inputs.shape[1])  # (b, T)
        yield Batch(segment.inputs, segment.targets, places < end.unsqueeze(1))
