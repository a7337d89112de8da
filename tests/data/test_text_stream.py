"""Streamed text = the text decoded at once, whole characters only."""

import random
from collections import Counter

import pytest
from tokenizers import Tokenizer

from allattn.data.text_stream import TextStream
from allattn.data.vocabulary import train_bpe, word_tokenizer

TEXT = "日本語 é naïve 😀 abc  ñandú "


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """Hardly a merge, so that most characters beyond ASCII are several tokens."""
    return train_bpe([f"{TEXT}\n".encode() * 3], 262)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.end()]


def test_words_are_separated_by_spaces_and_lines_by_eos() -> None:
    tokenizer = word_tokenizer(Counter({b"b": 2, b"a": 1}))  # <eos> 0, <unk> 1, b 2, a 3
    found = pieces(tokenizer, [3, 2, 0, 0, 1, 3, 0, 2])
    assert found == ["a", " b", "\n", "\n", "<unk>", " a", "\n", "b", ""]


def test_a_character_comes_when_it_is_whole(bpe: Tokenizer) -> None:
    ids = bpe.encode(TEXT).ids
    assert len(ids) > len(TEXT), "characters are split"
    found = pieces(bpe, ids)
    assert "".join(found) == TEXT
    assert "" in found[:-1]
    assert not any("�" in piece for piece in found)


def test_a_character_cut_off_is_marked(bpe: Tokenizer) -> None:
    """By the end of the text or of the line; what follows is whole again."""
    eos, (first, *_) = bpe.token_to_id("<eos>"), bpe.encode("😀").ids
    whole = bpe.encode("é").ids
    assert pieces(bpe, [first]) == ["", "�"]
    assert "".join(pieces(bpe, [*whole, first, eos, *whole])) == "é�\né"


def test_any_tokens_in_any_order(bpe: Tokenizer) -> None:
    """What an untrained model writes: line by line the decoding of all its tokens."""
    draw = random.Random(0)
    lines = [[draw.randrange(1, bpe.get_vocab_size()) for _ in range(draw.randrange(30))] for _ in range(60)]
    ids = [token for line in lines for token in (*line, 0)]
    expected = "".join(bpe.decode(line, skip_special_tokens=False) + "\n" for line in lines)
    assert "".join(pieces(bpe, ids)) == expected
