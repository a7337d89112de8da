"""Tokenizers: word level by training frequency, byte-level BPE, or an existing tokenizer.json.

Word level: a line is split on the space byte alone (no other white space), empty words dropped, and one
`<eos>` ends every line, blank lines included. `<eos>` is id 0 and `<unk>` id 1, so both are in the adaptive
softmax's first cluster; the training words follow by falling count, words of equal count in order of
first appearance. In the text the words `<unk>` and `<eos>` mean
these two tokens.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from allattn.errors import InputError, first_line
from allattn.files import write_atomically

EOS, UNK = "<eos>", "<unk>"
EOS_ID, UNK_ID = 0, 1  # of the word level
# What the subword tokenizers are given at once, in characters: they need some hundred bytes for each.
PIECE = 2**16
BATCH = 2**19
_END_OF_WORD = re.compile(r"(?<=\w) ")

Ids = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]  # of tokens in a text, rising
_UNSEEN = -1


class Encoded(NamedTuple):
    """A piece of text as ids."""

    ids: Ids  # (tokens,) int32
    unseen: Positions  # (u,) int64: tokens whose word the vocabulary lacks, so that they are `<unk>`


class WordTable(dict[bytes, int]):
    """Word -> id; words that the vocabulary lacks have a number that is no id."""

    def __missing__(self, word: bytes) -> int:
        return _UNSEEN


def split_words(chunk: bytes) -> Iterator[bytes]:
    """The words of whole lines, each line followed by `<eos>`."""
    return filter(None, chunk.replace(b"\n", b" <eos> ").split(b" "))


def number_of_words(chunk: bytes) -> int:
    """How many `split_words` gives, without a list of them."""
    in_word = ~np.isin(np.frombuffer(chunk, np.uint8), list(b" \n"))
    ends = np.count_nonzero(in_word[:-1] & ~in_word[1:])  # the last byte is a line's end
    return int(ends) + chunk.count(b"\n")


def count_words(chunks: Iterable[bytes]) -> Counter[bytes]:
    """How often each word occurs, in order of first appearance, special tokens left out."""
    counts: Counter[bytes] = Counter()
    for chunk in chunks:
        counts.update(filter(None, chunk.replace(b"\n", b" ").split(b" ")))
    for special in (EOS, UNK):
        counts.pop(special.encode(), None)
    return counts


def word_tokenizer(counts: Counter[bytes], minimum_count: int = 1) -> Tokenizer:
    """The word-level tokenizer of the given training counts.

    Args:
        counts: of the training split in order of first appearance, without special tokens.
        minimum_count: rarer words are left out and become `<unk>`.
    """
    frequent = [word for word, count in counts.items() if count >= minimum_count]
    vocabulary = {EOS: EOS_ID, UNK: UNK_ID}
    # Python's sort is stable, so words of equal count stay in order of first appearance.
    by_count = sorted(frequent, key=lambda word: -counts[word])
    for index, word in enumerate(by_count, start=len(vocabulary)):
        vocabulary[word.decode()] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return tokenizer


def is_word_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer is one of `word_tokenizer`'s."""
    values, ours = (json.loads(either.to_str()) for either in (tokenizer, word_tokenizer(Counter())))
    vocabulary = values["model"].pop("vocab", {})
    special = ours["model"].pop("vocab")
    return values == ours and special.items() <= vocabulary.items()


def word_table(tokenizer: Tokenizer) -> WordTable:
    """The ids of a word-level tokenizer, by UTF-8 bytes."""
    return WordTable((word.encode(), index) for word, index in tokenizer.get_vocab().items())


def encode_words(chunk: bytes, table: WordTable) -> Encoded:
    """Whole lines; the ids are the tokenizer's on each line, plus `<eos>`.

    The text's own word `<unk>` is in the vocabulary, so it is not unseen.
    """
    ids = np.fromiter(map(table.__getitem__, split_words(chunk)), np.int32)
    unseen = np.flatnonzero(ids == _UNSEEN)
    ids[unseen] = UNK_ID
    return Encoded(ids, unseen)


def train_bpe(chunks: Iterable[bytes], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer; it has fewer entries where the text has too few pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    batches = _batches(chunks, in_pieces=True)
    tokenizer.train_from_iterator(([piece for piece, _ in batch] for batch in batches), trainer)
    return tokenizer


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of what the tokenizer's vocabulary lacks; None where it lacks nothing, as by bytes."""
    model = json.loads(tokenizer.to_str())["model"]
    found = model.get("unk_id")  # of a unigram model
    return tokenizer.token_to_id(model.get("unk_token") or "") if found is None else int(found)


def encode_subwords(chunk: bytes, tokenizer: Tokenizer) -> Ids:
    """Ids (tokens,) int32 of whole lines, each line followed by `<eos>`.

    Memory: that of `BATCH` characters, or of the longest line where the tokenizer is not `splits_at_spaces`.
    """
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    parts: list[Ids] = []
    for batch in _batches([chunk], splits_at_spaces(tokenizer)):
        encoded = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
        for (_, ends_line), piece in zip(batch, encoded, strict=True):
            parts.append(np.array([*piece.ids, eos] if ends_line else piece.ids, np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def encode_text(chunk: bytes, tokenizer: Tokenizer) -> Ids:
    """Ids (tokens,) int32 of whole lines with their line breaks, as the tokenizers of others read text.

    It is cut at line ends into pieces of about `PIECE` characters; no special token is added.
    """
    pieces = [""]
    for line in chunk.decode().split("\n")[:-1]:  # no other character ends a line
        if len(pieces[-1]) >= PIECE:
            pieces.append("")
        pieces[-1] += f"{line}\n"
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return np.concatenate([np.array(piece.ids, np.int32) for piece in encoded])


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether a line may be cut before a space that follows a letter or digit, and has the same ids.

    True of byte-level BPE as trained here: such a space begins a pre-token, whose text alone decides its ids,
    and no rule looks back across it.
    """
    split, added = tokenizer.pre_tokenizer, tokenizer.get_added_tokens_decoder().values()
    return (
        isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and not split.add_prefix_space
        and tokenizer.normalizer is None
        and not any(token.lstrip or token.rstrip or " " in token.content for token in added)
    )


def load_tokenizer(path: Path, needs_eos: bool = True) -> Tokenizer:
    """Read a tokenizer.json; its truncation and padding are switched off.

    Args:
        path: of the file.
        needs_eos: `<eos>` ends the lines of its text.

    Raises:
        InputError: the file is missing, is no tokenizer, or has no `<eos>` where it needs one.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: is not a tokenizer.json ({first_line(error)})") from error
    if needs_eos and tokenizer.token_to_id(EOS) is None:
        raise InputError(f"{path}: has no {EOS} token, which ends every line; add it to the file")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer.json atomically."""
    write_atomically(path, tokenizer.to_str())


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 (hexadecimal) of the tokenizer: equal hashes mean that every text gets the same ids."""
    values = json.loads(tokenizer.to_str())
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _batches(chunks: Iterable[bytes], in_pieces: bool) -> Iterator[list[tuple[str, bool]]]:
    """Lines, or pieces of lines, with whether the line ends there; each list is about `BATCH` characters."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for chunk in chunks:
        for line in chunk.decode().split("\n")[:-1]:
            for piece in _pieces(line) if in_pieces else [(line, True)]:
                batch.append(piece)
                size += len(piece[0]) + 1
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _pieces(line: str) -> Iterator[tuple[str, bool]]:
    """A line cut at the first end of a word that comes `PIECE` characters after the cut before."""
    start = 0
    while end := _END_OF_WORD.search(line, start + PIECE):
        yield line[start : end.start()], False
        start = end.start()
    yield line[start:], True
