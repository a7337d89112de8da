"""The same ids in transformers as by our own readers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from allattn.data.vocabulary import (
    encode_subwords,
    encode_words,
    is_word_level,
    save_tokenizer,
    train_bpe,
    word_table,
    word_tokenizer,
)

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "allattn[hf]"')
huggingface = pytest.importorskip("allattn.huggingface", exc_type=ImportError)

TEXT = b"the cat <unk> sat\n\n on the mat , the\tend\n"
TOKENIZERS = {
    "word": word_tokenizer(Counter({word: 1 for word in TEXT.split() if word != b"<unk>"})),
    "bpe": train_bpe([TEXT], 270),
}
PIECES = [
    "the",
    "cat",
    " ",
    "  ",
    "\n",
    "\n\n",
    "<eos>",
    "<unk>",
    "x<eos>",
    "\t",
    "\r",
    "é",
    "日本",
    "\u2028",
]


@pytest.fixture(scope="module", params=TOKENIZERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers' of the same file."""
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    tokenizer = TOKENIZERS[request.param]
    save_tokenizer(tokenizer, path)
    tokens = {"bos_token": "<eos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    if request.param == "word":
        tokens["unk_token"] = "<unk>"
    return tokenizer, huggingface.AllAttentionTokenizer(str(path), **tokens)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_every_text_has_our_ids(pair: tuple[Tokenizer, Any], text: str) -> None:
    """Whole lines as our readers encode them; what follows the last line break has no `<eos>`."""
    tokenizer, theirs = pair
    lines = f"{text}\n".encode()
    if is_word_level(tokenizer):
        expected = encode_words(lines, word_table(tokenizer)).ids
    else:
        expected = encode_subwords(lines, tokenizer)
    assert theirs(text)["input_ids"] == expected.tolist()[:-1]
    assert theirs([text, "the"])["input_ids"][0] == expected.tolist()[:-1]


def test_texts_come_back(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, theirs = pair
    ids = theirs("the cat\nthe mat")["input_ids"]
    separated = "the cat <eos> the mat" if is_word_level(tokenizer) else "the cat<eos>the mat"
    assert theirs.decode(ids) == separated
    assert "<eos>" not in theirs.decode(ids, skip_special_tokens=True)
    batch = theirs(["the cat", "the"], padding=True, padding_side="left")
    assert batch["attention_mask"][1][0] == 0
    assert batch["input_ids"][1][0] == tokenizer.token_to_id("<eos>")


def test_what_is_saved_is_our_file(pair: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    """So its hash is still the one in the model's config.json."""
    tokenizer, theirs = pair
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path / "ours.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "ours.json").read_bytes()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is huggingface.AllAttentionTokenizer
    text = "the cat\nx<eos> the"
    assert again(text)["input_ids"] == theirs(text)["input_ids"]
    again.add_tokens(["new"])
    with pytest.raises(ValueError, match="has no vectors for"):
        again.save_pretrained(tmp_path)
