"""Words that the vocabulary lacks, told apart from the text's own <unk>."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from allattn.data.config import DataConfig, Source
from allattn.data.corpus import prepare
from allattn.data.vocabulary import EOS, train_bpe, unknown_id


def test_share_of_wikitext(wikitext_small: Path, tmp_path: Path) -> None:
    """7.9 % of the test text's words are not in the training text."""
    config = DataConfig(source=Source.files, folder=str(wikitext_small), cache_folder=str(tmp_path))
    splits = prepare(config, progress=False).splits
    shares = {name: len(split.unseen) / split.words for name, split in splits.items()}
    assert shares["train"] == 0
    assert shares["test"] == pytest.approx(0.079, abs=5e-4)
    train = set((wikitext_small / "wiki.train.tokens").read_text(encoding="utf-8").split()) | {EOS}
    for name, split in splits.items():
        lines = (wikitext_small / f"wiki.{name}.tokens").read_text(encoding="utf-8").split("\n")[:-1]
        words = [word for line in lines for word in (*line.split(), EOS)]
        assert split.unseen.tolist() == [at for at, word in enumerate(words) if word not in train]


def test_words_left_out_of_the_vocabulary_are_unseen(files_config: DataConfig) -> None:
    """The text's own <unk> is not; words rarer than data.minimum_count are, in the training text too."""
    unseen = {count: _unseen(replace(files_config, minimum_count=count)) for count in (1, 2)}
    assert unseen[1] == {"train": [], "valid": [1], "test": [1]}
    assert unseen[2] == {"train": [5], "valid": [1], "test": [1, 2]}


def _unseen(config: DataConfig) -> dict[str, list[int]]:
    splits = prepare(config, progress=False).splits
    return {name: split.unseen.tolist() for name, split in splits.items()}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Tokenizer(models.WordPiece({EOS: 0, "[UNK]": 1}, unk_token="[UNK]")), 1),
        (lambda: Tokenizer(models.Unigram([(EOS, 0.0), ("?", 0.0)], unk_id=1)), 1),
        (lambda: train_bpe([b"a b\n"], 257), None),
    ],
    ids=["WordPiece", "Unigram", "bytes"],
)
def test_what_a_given_tokenizer_lacks_has_an_id(make: Callable[[], Tokenizer], expected: int | None) -> None:
    assert unknown_id(make()) == expected
