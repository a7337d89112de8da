"""allattn evaluate: what it says of one model, and of two on the same text."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_fixtures import CommandLine

from allattn.commands.evaluate import with_places_as_settings
from allattn.data.config import DataConfig, Source
from allattn.errors import InputError
from allattn.record.articles import articles_from_record
from allattn.record.bootstrap import perplexity_difference
from allattn.training.checkpoints import read_checkpoint, write_checkpoint
from allattn.training.run_folder import RunFolder

LENGTHS = {"valid": [3, 3], "test": [4, 9, 2, 6]}  # lines of each article


@pytest.fixture(scope="module")
def trained(runs_below: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on a text of articles; two words of every test article are not in the training text."""
    base, rng = tmp_path_factory.mktemp("articles"), random.Random(0)
    lines = [" ".join(rng.choices("abcdefgh", k=8)) for _ in range(60)]
    (base / "wiki.train.tokens").write_text("".join(f" {line} \n" for line in [" = a b = ", *lines]))
    for split, lengths in LENGTHS.items():
        articles = [[" = a b = ", "new <unk> newer", *lines[length:][:length]] for length in lengths]
        text = "".join(f"{line}\n" for article in articles for line in article)
        (base / f"wiki.{split}.tokens").write_text(text)
    runs = runs_below(base / "runs")
    runs.data = DataConfig(source=Source.files, folder=str(base), cache_folder=str(base / "cache"))
    folder: RunFolder = runs.run(runs.pretraining("dense"))
    return folder


@pytest.fixture
def other(trained: RunFolder, tmp_path: Path) -> Callable[..., Path]:
    """Another model beside the same tokenizer; keyword arguments change what its checkpoint records."""

    def write(**changes: str) -> Path:
        checkpoint = read_checkpoint(trained.last)
        noise = torch.Generator().manual_seed(0)
        for weight in checkpoint["state_dict"].values():
            weight += 0.1 * torch.randn(weight.shape, generator=noise)
        checkpoint["allattn"] |= changes
        path = tmp_path / "other.ckpt"
        write_checkpoint(path, checkpoint)
        (tmp_path / "tokenizer.json").write_bytes(trained.tokenizer.read_bytes())
        return path

    return write


def test_one_model(trained: RunFolder, command_line: CommandLine) -> None:
    done = command_line("evaluate", f"checkpoint={trained.last}", "eval.segment_length=5")
    assert done.status == 0, done.err
    perplexity, how, unseen = done.out.splitlines()
    record = json.loads(trained.result.read_text())["dense"]["test"]
    tokens = record["tokens_scored"]
    assert f"per token {record['perplexity']:.4f}" in perplexity
    assert "mode memory, memory length 4, segment length 5; <eos> scored as a word; float32, cpu" in how
    found = re.search(r"(\d+) of (\d+) tokens .*token ([\d.]+) with and ([\d.]+) without", unseen)
    assert found is not None, unseen
    assert (int(found[1]), int(found[2])) == (2 * len(LENGTHS["test"]), tokens)
    assert float(found[3]) == pytest.approx(record["perplexity"], abs=1e-4)
    assert float(found[4]) == pytest.approx(record["unseen_words"]["perplexity_without"], abs=1e-4)
    window = command_line(
        "evaluate", str(trained.last), "eval.mode=window", "eval.context=9", "eval.stride=2"
    )
    assert "mode window, memory length 4, context 9, stride 2;" in window.out, window.err


def test_two_models_and_their_difference(
    trained: RunFolder, other: Callable[..., Path], command_line: CommandLine, tmp_path: Path
) -> None:
    first, second, kept = str(trained.last), str(other()), tmp_path / "kept.json"
    done = command_line("evaluate", first, second, f"articles={kept}")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert (lines[0], lines[4]) == (first, second)
    values = [float(re.findall(r"per token ([\d.]+)", lines[line])[0]) for line in (1, 5)]
    articles = [articles_from_record(record)["test"] for record in json.loads(kept.read_text()).values()]
    for value, of_model in zip(values, articles, strict=True):
        assert len(of_model.tokens) == len(LENGTHS["test"])
        assert math.exp(of_model.nats.sum() / of_model.tokens.sum()) == pytest.approx(value, abs=1e-4)
    found = perplexity_difference(*articles)
    assert found.difference == pytest.approx(values[0] - values[1], abs=2e-4)
    assert lines[-1].startswith(f"{first} minus {second}: {found.difference:+.4f} perplexity per token")
    assert f"[{found.low:+.4f}, {found.high:+.4f}]" in lines[-1]
    assert "10,000 draws of 4 articles, too few" in lines[-1]


def test_models_of_other_texts_are_refused(
    trained: RunFolder, other: Callable[..., Path], command_line: CommandLine
) -> None:
    """Before anything is scored; the text may be named, the vocabulary must be the same."""
    named = ["data.source=files", f"data.folder={trained.path.parents[1]}"]
    for changes, settings, message in (
        ({"tokenizer_hash": "0" * 64}, named, "has another vocabulary than"),
        ({"fingerprint": "0" * 64}, [], "has another text than"),
    ):
        done = command_line("evaluate", str(trained.last), str(other(**changes)), *settings)
        assert (done.status, done.out) == (2, "")
        assert message in done.err
        assert done.err.count("\n") == 1
    done = command_line("evaluate", str(trained.last), str(other(fingerprint="0" * 64)), *named)
    assert done.status == 0, done.err


def test_places_are_settings() -> None:
    assert with_places_as_settings(["a"]) == ["checkpoint=a"]
    assert with_places_as_settings(["split=valid", "a", "b", "--help"]) == [
        "checkpoint=a",
        "against=b",
        "split=valid",
        "--help",
    ]
    with pytest.raises(InputError, match="takes one checkpoint, or two"):
        with_places_as_settings(["a", "b", "c"])
    for words in (["a", "checkpoint=b"], ["a", "b", "against=c"]):
        with pytest.raises(InputError, match="both say which checkpoint"):
            with_places_as_settings(words)
