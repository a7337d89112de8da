"""Titles of level one, and where the articles are in the ids."""

from dataclasses import replace
from pathlib import Path

import pytest

from allattn.data import text_files
from allattn.data.articles import at_titles
from allattn.data.config import DataConfig, Source
from allattn.data.corpus import Corpus, prepare
from allattn.data.vocabulary import EOS

LINES = [
    " ",
    " = Tale of = two",
    " = A = ",
    " x",
    " = = Part = = ",
    " = = = Piece = = = ",
    " a = b",
    " = ",
    " = = ",
    " = B ( 2008 ) = ",
    "= C =",
    " = 2 = 3 = ",
]
TEXT = "".join(f"{line}\n" for line in LINES).encode()
TITLES = [b" = A = ", b" = B ( 2008 ) = ", b"= C =", b" = 2 = 3 = "]


def test_pieces_begin_at_titles_and_are_the_whole_text() -> None:
    pieces = list(at_titles(TEXT))
    assert b"".join(piece for piece, _ in pieces) == TEXT
    assert [piece.split(b"\n")[0] for piece, titled in pieces if titled] == TITLES
    assert [titled for _, titled in pieces] == [False, True, True, True, True]
    assert list(at_titles(b" = A = \nx\n")) == [(b" = A = \nx\n", True)]
    assert list(at_titles(b"x\n = = \n")) == [(b"x\n = = \n", False)]


@pytest.mark.parametrize("tokenizer", ["word", "bpe"])
def test_articles_of_a_text_read_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    for split in ("train", "valid"):
        (tmp_path / f"wiki.{split}.tokens").write_bytes(TEXT)
    (tmp_path / "wiki.test.tokens").write_bytes(b"no title\n")
    config = DataConfig(source=Source.files, folder=str(tmp_path), tokenizer=tokenizer)
    config = replace(config, vocabulary_size=300 if tokenizer == "bpe" else None)
    for chunk_bytes in (1, 40, 10_000):
        monkeypatch.setattr(text_files.read_lines, "__defaults__", (chunk_bytes,))
        corpus = prepare(replace(config, cache_folder=str(tmp_path / str(chunk_bytes))), progress=False)
        for split in ("train", "valid"):
            assert first_lines(corpus, split) == TITLES
        assert corpus.splits["test"].articles.tolist() == []
        assert all(not len(split.unseen) for split in corpus.splits.values() if tokenizer == "bpe")


def first_lines(corpus: Corpus, split: str) -> list[bytes]:
    """Each article's first line, decoded from the ids at its position; spaces at its ends as in TITLES."""
    encoded, found = corpus.splits[split], []
    for position, title in zip(encoded.articles.tolist(), TITLES, strict=True):
        line = encoded.ids[position:].tolist()
        line = line[: line.index(corpus.tokenizer.token_to_id(EOS))]
        words = corpus.tokenizer.decode(line).split()
        found.append(title if words == title.decode().split() else " ".join(words).encode())
    return found


def test_wikitext_has_its_articles(wikitext_small: Path, tmp_path: Path) -> None:
    config = DataConfig(source=Source.files, folder=str(wikitext_small), cache_folder=str(tmp_path))
    splits = prepare(config, progress=False).splits
    assert [len(split.articles) for split in splits.values()] == [48, 6, 6]
