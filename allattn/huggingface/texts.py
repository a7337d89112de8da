"""A text of our `data=` settings through the tokenizer of a model of others."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allattn.data.config import DataConfig, Source, check_data
from allattn.data.segments import NOT_SCORED, Ids
from allattn.data.sources import open_source
from allattn.data.vocabulary import number_of_words
from allattn.errors import InputError
from allattn.head_study.texts import Text, in_windows
from allattn.heads.watched import Batch

_BYTES_PER_TOKEN = 32  # more than a token has on average: read first, where only some tokens are wanted


@dataclass(frozen=True)
class Tokens:
    """The beginning of a split."""

    ids: Ids  # (N,)
    words: int  # that the ids after the first spell, an end of a line counted as one, as `evaluate` counts
    start: int | None  # what the tokenizer puts before every text; None = nothing


def read_tokens(data: DataConfig, split: str, tokenizer: Any, tokens: int | None) -> Tokens:
    """Encode a split as one text, its lines and `<unk>` as they stand there.

    Args:
        data: which text; its tokenizer is the model's.
        split: train, valid or test.
        tokenizer: of transformers.
        tokens: to score, after the first one; None = all. A text with fewer gives what it has.

    Raises:
        InputError: the text is missing or not usable, or a setting is about another tokenizer.
    """
    _check(data)
    source = open_source(data)
    wanted = None if tokens is None else tokens + 1
    size = None if wanted is None else wanted * _BYTES_PER_TOKEN
    while True:
        text, whole = _beginning(source.chunks(split), size)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(found["input_ids"], np.int32)
        if whole or size is None or wanted is None or len(ids) >= wanted:
            break
        size *= 2
    if wanted is not None and len(ids) > wanted:
        ids, text = ids[:wanted], text[: found["offset_mapping"][wanted - 1][1]]
    words = number_of_words(text.encode() + b" ") - 1
    return Tokens(ids, words, _start(tokenizer))


def windows(tokens: Tokens, rows: int, length: int) -> Text:
    """`in_windows`, each after the token that the tokenizer puts before a text, which is read and not scored.

    Every token after the text's first is scored once.

    Args:
        tokens: a text of at least `length` tokens after the first.
        rows: windows at once.
        length: tokens of a window, that token included.
    """
    start = tokens.start
    if start is None:
        return in_windows(tokens.ids, rows, length)
    inner = in_windows(tokens.ids, rows, length - 1)
    return replace(
        inner, batches=lambda: (_started(batch, start) for batch in inner.batches()), length=length
    )


def check_context(config: Any, length: int) -> None:
    """Refuse windows that the model has no positions for.

    Raises:
        InputError: says how many there are.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise InputError(f"length={length}: the model has {positions} positions; give at most as many")


def _check(data: DataConfig) -> None:
    if data.source is Source.checkpoint:
        raise InputError(
            "data.source=checkpoint: a model of others does not say on what text it was trained; name one by "
            "data.source=wikitext103_raw (or another of the hub), or data.source=files data.folder=FOLDER"
        )
    own = DataConfig()
    for name in ("tokenizer", "vocabulary_size", "minimum_count"):
        if getattr(data, name) != getattr(own, name):
            raise InputError(
                f"data.{name}={getattr(data, name)} has no effect: a model of others has its own tokenizer"
            )
    check_data(replace(data, tokenizer="the model's"))


def _beginning(chunks: Iterable[bytes], size: int | None) -> tuple[str, bool]:
    """At least the first `size` bytes, in whole lines, and whether that is all."""
    parts: list[bytes] = []
    read = 0
    for chunk in chunks:
        if size is not None and read >= size:
            return b"".join(parts).decode(), False
        end = len(chunk) if size is None else chunk.find(b"\n", max(0, size - read - 1)) + 1 or len(chunk)
        parts.append(chunk[:end])
        read += end
        if end < len(chunk):
            return b"".join(parts).decode(), False
    return b"".join(parts).decode(), True


def _start(tokenizer: Any) -> int | None:
    """The one token that the tokenizer puts before a text; None where it puts none."""
    bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    first = full[0] if full and full[: len(bare)] != bare else None
    return first if first is not None and first == tokenizer.bos_token_id else None


def _started(batch: Batch, start: int) -> Batch:
    def before(x: Tensor, value: int) -> Tensor:
        return torch.cat([torch.full_like(x[:, :1], value), x], dim=1)

    return Batch(before(batch.ids, start), before(batch.targets, NOT_SCORED), before(batch.real, True))
