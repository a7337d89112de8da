"""Texts through the tokenizer of a model of others: tokens, windows, words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.foreign_folders import word_tokens

from allattn.data.config import DataConfig, Source
from allattn.data.segments import NOT_SCORED
from allattn.errors import InputError
from allattn.huggingface.texts import Tokens, check_context, read_tokens, windows

TEST = "w3 w1\n\n w7 w0 <unk> w2 \nw5\n"
IDS = [5, 3, 9, 2, 0, 4, 7]


@pytest.fixture
def data(files_config: DataConfig) -> DataConfig:
    """Files whose test split is `TEST`."""
    Path(f"{files_config.folder}/wiki.test.tokens").write_text(TEST)
    return files_config


def test_a_split_is_one_text(data: DataConfig) -> None:
    whole = read_tokens(data, "test", word_tokens(), None)
    assert whole.ids.tolist() == IDS
    assert whole.words == 7 + 4 - 1  # words, ends of lines; the first word is not scored
    assert whole.start is None
    some = read_tokens(data, "test", word_tokens(), 4)
    assert some.ids.tolist() == IDS[:5]
    assert some.words == 5 + 2 - 1
    assert read_tokens(data, "test", word_tokens(), 100).ids.tolist() == IDS
    assert read_tokens(data, "test", word_tokens(starts=True), None).start == 1


def test_long_texts_are_read_as_far_as_is_needed(data: DataConfig) -> None:
    """Long words: the first guess of bytes holds too few tokens."""
    Path(f"{data.folder}/wiki.train.tokens").write_text(("x" * 300 + " w1\n") * 50)
    found = read_tokens(data, "train", word_tokens(), 10)
    assert found.ids.tolist() == [0, 3] * 5 + [0]
    assert found.words == 11 + 5 - 1


def test_windows_after_the_token_that_starts_a_text() -> None:
    """Six tokens after the first, two to a window of three: its first is read alone."""
    text = windows(Tokens(np.array(IDS, np.int32), 9, start=1), rows=2, length=3)
    batches = list(text.batches())
    assert [batch.ids.tolist() for batch in batches] == [[[1, 5, 3], [1, 9, 2]], [[1, 0, 4]]]
    assert [batch.targets.tolist() for batch in batches] == [
        [[NOT_SCORED, 3, 9], [NOT_SCORED, 2, 0]],
        [[NOT_SCORED, 4, 7]],
    ]
    assert all(bool(batch.real.all()) for batch in batches)
    assert (text.tokens, text.length) == (6, 3)
    plain = windows(Tokens(np.array(IDS, np.int32), 9, start=None), rows=2, length=3)
    assert [batch.ids.tolist() for batch in plain.batches()] == [[[5, 3, 9], [2, 0, 4]]]


def test_settings_of_another_tokenizer_are_refused(data: DataConfig) -> None:
    for name, value in (("tokenizer", "bpe"), ("minimum_count", 3)):
        with pytest.raises(InputError, match=f"data.{name}={value} has no effect"):
            read_tokens(replace(data, **{name: value}), "test", word_tokens(), None)
    with pytest.raises(InputError, match="name one by"):
        read_tokens(DataConfig(source=Source.checkpoint), "test", word_tokens(), None)
    with pytest.raises(InputError, match="length=9: the model has 8 positions"):
        check_context(type("Config", (), {"max_position_embeddings": 8}), 9)
