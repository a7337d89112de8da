"""Write a corpus of WikiText-103's size, for measuring: Zipf-like word frequencies, every word in train.

    python tests/data/generate_zipf.py FOLDER [--train 103227021] [--words 267733] [--seed 0]

Takes about 600 MB of disk at full size; memory stays below a few hundred MB.
"""

import argparse
from pathlib import Path

import numpy as np

BLOCK = 1_000_000  # tokens written at once
LINE = 57  # mean tokens a line, its end included, as in WikiText-103


def write_split(
    path: Path, tokens: int, words: np.ndarray, generator: np.random.Generator, every_word: bool = False
) -> None:
    """Write exactly `tokens` tokens, line ends counted, with frequencies falling as 1 / rank.

    Args:
        path: the file.
        tokens: at least len(words) + 1 with `every_word`.
        words: (V,) bytes objects, the most frequent first.
        generator: of the words and the line ends.
        every_word: begin with each word once.
    """
    with path.open("wb") as file:
        start = len(words) if every_word else 0
        if every_word:
            file.write(b" ".join(words) + b" ")
        for begin in range(start, tokens, BLOCK):
            size = min(BLOCK, tokens - begin)
            ranks = (len(words) + 1) ** generator.random(size) - 1  # log-uniform: P(rank) ~ 1 / (rank + 1)
            pieces = words[ranks.astype(np.int64)] + b" "
            pieces[generator.random(size) < 1 / LINE] = b"\n"
            if begin + size == tokens:
                pieces[-1] = b"\n"
            file.write(b"".join(pieces))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=103_227_021, help="tokens of the training split")
    parser.add_argument("--valid", type=int, default=217_646)
    parser.add_argument("--test", type=int, default=245_569)
    parser.add_argument(
        "--words", type=int, default=267_733, help="distinct words, special tokens not counted"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(arguments.seed)
    words = np.array([f"w{index:x}".encode() for index in range(arguments.words)], dtype=object)
    for split in ("train", "valid", "test"):
        path = arguments.folder / f"wiki.{split}.tokens"
        write_split(path, getattr(arguments, split), words, generator, every_word=split == "train")


if __name__ == "__main__":
    main()
