"""Unigram and add-k bigram perplexity of three token files, computed without the package.

    python tests/baselines.py FOLDER     (FOLDER holds wiki.{train,valid,test}.tokens)

The same convention: split at spaces, `<eos>` at each line's end, training words only, others `<unk>`, every
token after the first scored once. k is the best of a grid on the validation split.
"""

import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path


def read_tokens(path: Path) -> list[str]:
    """Words of a file, one <eos> per line."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [word for line in lines for word in [*line.split(" "), "<eos>"] if word]


def known(tokens: list[str], vocabulary: set[str]) -> list[str]:
    """Tokens with unknown words replaced."""
    return [token if token in vocabulary else "<unk>" for token in tokens]


def unigram_perplexity(train: list[str], text: list[str], k: float, size: int) -> float:
    """Perplexity of the tokens after the first under add-k unigram counts."""
    counts, total = Counter(train), len(train) + k * size
    return math.exp(-sum(math.log((counts[w] + k) / total) for w in text[1:]) / (len(text) - 1))


def bigram_perplexity(train: list[str], text: list[str], k: float, size: int) -> float:
    """Perplexity of the tokens after the first under add-k bigram counts."""
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    nats = -sum(math.log((pairs[v, w] + k) / (firsts[v] + k * size)) for v, w in pairwise(text))
    return math.exp(nats / (len(text) - 1))


def baselines(folder: Path) -> dict[str, float]:
    """Test perplexities of both models, with the k that is best on the validation split."""
    splits = {name: read_tokens(folder / f"wiki.{name}.tokens") for name in ("train", "valid", "test")}
    vocabulary = set(splits["train"]) | {"<unk>", "<eos>"}
    train, valid, test = (known(splits[name], vocabulary) for name in ("train", "valid", "test"))
    size, found = len(vocabulary), {}
    for name, perplexity in (("unigram", unigram_perplexity), ("bigram", bigram_perplexity)):
        grid = [10**e for e in (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5)]
        best = min(grid, key=lambda k: perplexity(train, valid, k, size))
        found[name] = perplexity(train, test, best, size)
    return found


if __name__ == "__main__":
    for name, value in baselines(Path(sys.argv[1])).items():
        print(f"{name}: test perplexity {value:.2f}")
