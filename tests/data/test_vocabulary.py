import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from allattn.data import vocabulary
from allattn.data.vocabulary import (
    EOS,
    UNK,
    count_words,
    encode_subwords,
    encode_words,
    is_word_level,
    load_tokenizer,
    number_of_words,
    save_tokenizer,
    split_words,
    splits_at_spaces,
    tokenizer_hash,
    train_bpe,
    word_table,
    word_tokenizer,
)
from allattn.errors import InputError

ODD = (
    "  two  spaces \n\n \ntab\tinside\nno\u00a0break\nline\u2028separator\nv\x0bt f\x0cf\n"
    "<unk> <eos> <UNK> a<eos>b\n"
    "caf\u00e9 cafe\u0301 \U0001f600\n\ufeffmark\ncarriage\rreturn\n"
).encode()

BPE = train_bpe([b"it's a banana, we'll see ab ba 12 1 the  end\n" * 9, ODD], 300)


def reference_order(text: str) -> list[str]:
    """Words by falling count, then by first appearance, from a plain loop."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for place, word in enumerate(text.replace("\n", " ").split(" ")):
        if word not in ("", EOS, UNK):
            counts[word] = counts.get(word, 0) + 1
            first.setdefault(word, place)
    return sorted(counts, key=lambda word: (-counts[word], first[word]))


def assert_same_ids_as_tokenizer(chunk: bytes, tokenizer: Tokenizer) -> None:
    table = word_table(tokenizer)
    expected: list[int] = []
    for line in chunk.decode().split("\n")[:-1]:
        ids = [*tokenizer.encode(line).ids, tokenizer.token_to_id(EOS)]
        assert encode_words(f"{line}\n".encode(), table).ids.tolist() == ids
        expected += ids
    assert encode_words(chunk, table).ids.tolist() == expected


def test_ids_of_a_small_text() -> None:
    counts = count_words([b" b a \n<unk> b <eos> c\n", b"\nc b\n"])
    tokenizer = word_tokenizer(counts)
    assert tokenizer.get_vocab() == {EOS: 0, UNK: 1, "b": 2, "c": 3, "a": 4}
    ids, unseen = encode_words(b" a  b \n\nnew <unk> <eos>\n", word_table(tokenizer))
    assert ids.dtype == "int32"
    assert ids.tolist() == [4, 2, 0, 0, 1, 1, 0, 0]
    assert unseen.tolist() == [4], "the text's own <unk> is in the vocabulary"


def test_minimum_count() -> None:
    tokenizer = word_tokenizer(Counter({b"a": 3, b"b": 2, b"c": 1}), minimum_count=2)
    assert tokenizer.get_vocab() == {EOS: 0, UNK: 1, "a": 2, "b": 3}


def test_encode_equals_the_tokenizer_on_odd_lines() -> None:
    counts = count_words([ODD])
    assert (
        counts["no\u00a0break".encode()]
        == counts[b"tab\tinside"]
        == counts["line\u2028separator".encode()]
        == 1
    )
    assert_same_ids_as_tokenizer(ODD, word_tokenizer(counts))
    assert_same_ids_as_tokenizer(ODD, word_tokenizer(Counter({b"spaces": 2})))  # nearly all <unk>


def test_wikitext_vocabulary(wikitext_small: Path) -> None:
    text = (wikitext_small / "wiki.train.tokens").read_bytes()
    counts = count_words([text])
    tokenizer = word_tokenizer(counts)
    words = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    assert words == [EOS, UNK, *reference_order(text.decode())]

    lines = text.split(b"\n")[:-1]
    random.Random(1).shuffle(lines)
    again = word_tokenizer(count_words([text]))
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    shuffled = word_tokenizer(count_words([b"".join(line + b"\n" for line in lines)]))
    of_id = [counts[shuffled.id_to_token(index).encode()] for index in range(2, len(words))]
    assert of_id == [counts[word.encode()] for word in words[2:]]  # only words of equal count trade places
    assert tokenizer_hash(shuffled) != tokenizer_hash(tokenizer)  # which a checkpoint's hash tells apart

    valid = (wikitext_small / "wiki.valid.tokens").read_bytes()
    assert_same_ids_as_tokenizer(valid, tokenizer)


def test_hash_tells_swapped_words_apart() -> None:
    same = word_tokenizer(Counter({b"a": 2, b"b": 1}))
    assert tokenizer_hash(same) == tokenizer_hash(word_tokenizer(Counter({b"b": 1, b"a": 2})))
    assert tokenizer_hash(same) != tokenizer_hash(word_tokenizer(Counter({b"b": 1, b"a": 1})))
    assert tokenizer_hash(same) != tokenizer_hash(word_tokenizer(Counter({b"a": 1, b"b": 2})))


def test_save_and_load(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(count_words([ODD]))
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)
    assert encode_subwords(ODD, loaded).tolist() == encode_words(ODD, word_table(tokenizer)).ids.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_only_our_word_level_is_taken_for_it() -> None:
    tokenizer = word_tokenizer(Counter({b"a": 1}))
    assert is_word_level(Tokenizer.from_str(tokenizer.to_str()))
    assert not is_word_level(train_bpe([b"a b\n"], 257))
    assert not is_word_level(Tokenizer(models.WordLevel({EOS: 0, UNK: 1}, unk_token=UNK)))  # does not split
    tokenizer.normalizer = normalizers.Lowercase()
    assert not is_word_level(tokenizer)
    swapped = Tokenizer(models.WordLevel({UNK: 0, EOS: 1}, unk_token=UNK))
    swapped.pre_tokenizer = word_tokenizer(Counter()).pre_tokenizer
    assert not is_word_level(swapped)


def test_bpe_is_lossless_and_repeatable() -> None:
    text = "the cat sat on the mat\n the  cat \u00e9\n\n".encode() * 50 + "line\u2028x\ttab\n".encode()
    tokenizer = train_bpe([text], 300)
    assert tokenizer.token_to_id(EOS) == 0
    assert 257 < tokenizer.get_vocab_size() <= 300
    assert tokenizer_hash(train_bpe([text], 300)) == tokenizer_hash(tokenizer)

    unseen = "an unseen \U0001f600 line\n\n  a cat \n".encode()
    ids = encode_subwords(unseen, tokenizer)
    assert ids.dtype == "int32"
    assert (ids == 0).sum() == 3
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False).replace(EOS, "\n").encode() == unseen
    assert len(encode_subwords(b"the cat\n", tokenizer)) < len("the cat\n")  # merges are used


LINES = st.lists(
    st.text(alphabet="ab1_ \t\u00a0\u180e\u3000\u0301\u4e00'.s<>\x1c", max_size=60)
    | st.sampled_from(["it's <eos> b", "a <eos>", "1  2 ", "we'll  go"]),
    min_size=1,
    max_size=4,
)


@given(lines=LINES, piece=st.integers(1, 5), batch=st.integers(1, 9))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pieces_of_a_line_have_the_ids_of_the_line(lines: list[str], piece: int, batch: int) -> None:
    expected: list[int] = []
    for line in lines:
        expected += [*BPE.encode(line, add_special_tokens=False).ids, BPE.token_to_id(EOS)]
    text = "".join(f"{line}\n" for line in lines).encode()
    assert number_of_words(text) == len(list(split_words(text)))
    whole = tokenizer_hash(train_bpe([text], 280))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "PIECE", piece)
        patch.setattr(vocabulary, "BATCH", batch)
        assert encode_subwords(text, BPE).tolist() == expected
        assert tokenizer_hash(train_bpe([text], 280)) == whole


def test_only_tokenizers_that_split_at_spaces_get_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others read the whole line: what they do at its beginning, they do once."""
    monkeypatch.setattr(vocabulary, "PIECE", 1)
    assert splits_at_spaces(BPE)
    text = "one two three four"
    changes: list[dict[str, Any]] = [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"normalizer": normalizers.Prepend("x")},
        {"added": AddedToken("one", rstrip=True)},
        {"added": AddedToken("two three")},
    ]
    for change in changes:
        other = Tokenizer.from_str(BPE.to_str())
        for name, value in change.items():
            if name == "added":
                other.add_tokens([value])
            else:
                setattr(other, name, value)
        assert not splits_at_spaces(other)
        assert encode_subwords(f"{text}\n".encode(), other).tolist() == [*other.encode(text).ids, 0]


MEMORY = """
from pathlib import Path
from allattn.data.vocabulary import BATCH, encode_subwords, number_of_words, train_bpe
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
def use(size):
    text = b"word and word " * (size // 14) + b"\\n"
    encode_subwords(text, train_bpe([text], 300))
    number_of_words(text)
    return len(text)
before = peak()
use(BATCH)
first = peak()
size = use(6 * BATCH)
print(first - before, peak() - first, size)
"""


def test_memory_of_a_long_line_is_that_of_a_batch() -> None:
    """3 MB on one line: its bytes, text, pieces and ids at most twice each, besides one batch."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    of_a_batch, more, size = map(int, done.stdout.split())
    assert more < of_a_batch + 2 * size * (1 + 1 + 1 + 4)


def test_given_tokenizer_is_not_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = train_bpe([b"a b c\n"], 257)
    plain = encode_subwords(b"a b c d e f\na\n", tokenizer).tolist()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    tokenizer.save(str(tmp_path / "given.json"))
    assert encode_subwords(b"a b c d e f\na\n", load_tokenizer(tmp_path / "given.json")).tolist() == plain


def test_refuses_unusable_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "wrong.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"wrong\.json: is not a tokenizer"):
        load_tokenizer(tmp_path / "wrong.json")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "no_end.json"))
    with pytest.raises(InputError, match="<eos>"):
        load_tokenizer(tmp_path / "no_end.json")
