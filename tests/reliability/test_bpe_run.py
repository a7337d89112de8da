"""Subwords from end to end: a byte-level BPE is trained, a model on it, and both are evaluated and pruned."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import run
from tokenizers import Tokenizer

from allattn.training.run_folder import RunFolder

Arguments = Callable[..., list[str]]
VOCABULARY = 300
SYLLABLES = ("ka", "lo", "mé", "ri", "tu", "zß", "日", "no")


@pytest.fixture(scope="module")
def subword_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of syllables with accents, double spaces and blank lines, so tokens, words and bytes differ."""
    folder = tmp_path_factory.mktemp("subwords")
    rng = random.Random(3)
    for split, lines in (("train", 80), ("valid", 14), ("test", 11)):
        text = []
        for line in range(lines):
            words = ["".join(rng.choices(SYLLABLES, k=rng.randrange(1, 4))) for _ in range(9)]
            text.append("" if line % 7 == 5 else " ".join(words).replace(" ", "  ", line % 3))
        (folder / f"wiki.{split}.tokens").write_text("\n".join(text) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, pretraining: Arguments, subword_text: Path
) -> RunFolder:
    base = tmp_path_factory.mktemp("bpe")
    folder = RunFolder(base / "bpe")
    run(
        base / "output",
        "train.py",
        *pretraining(folder, "schedule.steps=12"),
        f"data.folder={subword_text}",
        "data.tokenizer=bpe",
        f"data.vocabulary_size={VOCABULARY}",
    )
    return folder


def counted(text: Path, split: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Tokens and words of a split, one <eos> a line, counted without the package."""
    lines = (text / f"wiki.{split}.tokens").read_text(encoding="utf-8").split("\n")[:-1]
    tokens = sum(len(tokenizer.encode(line, add_special_tokens=False).ids) + 1 for line in lines)
    words = sum(len([word for word in line.split(" ") if word]) + 1 for line in lines)
    return tokens, words


def test_tokens_and_words_are_those_of_the_text(trained: RunFolder, subword_text: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained.tokenizer))
    assert 256 < tokenizer.get_vocab_size() <= VOCABULARY
    result: dict[str, Any] = json.loads(trained.result.read_text())
    assert result["corpus"]["vocabulary_size"] == tokenizer.get_vocab_size()
    for split in ("valid", "test"):
        tokens, words = counted(subword_text, split, tokenizer)
        record = result["dense"][split]
        assert words < tokens, "a word is several tokens"
        assert (record["tokens_scored"], record["words_scored"]) == (tokens - 1, words - 1)
        nats = record["nats_per_token"] * (tokens - 1)
        assert record["perplexity"] == pytest.approx(math.exp(nats / (tokens - 1)), rel=1e-12)
        assert record["word_perplexity"] == pytest.approx(math.exp(nats / (words - 1)), rel=1e-9)
        assert record["word_perplexity"] > record["perplexity"]
    for line in (subword_text / "wiki.valid.tokens").read_text(encoding="utf-8").split("\n"):
        assert tokenizer.decode(tokenizer.encode(line, add_special_tokens=False).ids) == line


def test_evaluation_repeats_the_runs_numbers(trained: RunFolder, tmp_path: Path) -> None:
    record = json.loads(trained.result.read_text())["dense"]["test"]
    output = run(tmp_path / "output", "allattn", "evaluate", f"checkpoint={trained.last}").output
    found = re.search(
        r"per word ([\d.]+), per token ([\d.]+) .* ([\d,]+) tokens, ([\d,]+) words scored", output
    )
    assert found is not None, output
    assert float(found[1]) == pytest.approx(record["word_perplexity"], rel=1e-4)
    assert float(found[2]) == pytest.approx(record["perplexity"], rel=1e-4)
    assert int(found[3].replace(",", "")) == record["tokens_scored"]
    assert int(found[4].replace(",", "")) == record["words_scored"]


def test_pruning_keeps_the_subwords(trained: RunFolder, tmp_path: Path, pruning: Arguments) -> None:
    """The text comes from the checkpoint, the tokenizer.json beside it is taken as it is."""
    folder = RunFolder(tmp_path / "pruned")
    arguments = [a for a in pruning(folder, trained.last) if not a.startswith(("data=", "data.folder="))]
    run(tmp_path / "output", "prune.py", *arguments)
    assert folder.tokenizer.read_bytes() == trained.tokenizer.read_bytes()
    before, after = (json.loads(f.result.read_text()) for f in (trained, folder))
    assert before["corpus"] == after["corpus"]
    for split in ("valid", "test"):
        assert after["dense"][split] == before["dense"][split]
        for name in ("tokens_scored", "words_scored"):
            assert after["pruned"][split][name] == before["dense"][split][name]


def test_a_given_tokenizer_file_gives_the_same_run(
    trained: RunFolder, tmp_path: Path, pretraining: Arguments, subword_text: Path
) -> None:
    folder = RunFolder(tmp_path / "given")
    own = [f"data.folder={subword_text}", f"data.cache_folder={tmp_path}/cache"]
    arguments = [*pretraining(folder, "schedule.steps=12"), *own, f"data.tokenizer={trained.tokenizer}"]
    run(tmp_path / "output", "train.py", *arguments)
    before, after = (json.loads(f.result.read_text())["dense"] for f in (trained, folder))
    assert after["test"] == before["test"]
