"""Times of two states of the package, in turn: python tests/paired_benchmark.py BEFORE AFTER [--rounds N].

BEFORE and AFTER are folders with the source (`git worktree add BEFORE COMMIT`). A process for each imports
its own and waits while the other one measures; whatever else the machine does hits both. The benchmark's
default sizes: 4 of the paper's layers, B = 4, T = M = 192.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

ACTIONS = ("core_training", "layers_training", "training_step", "layers_inference", "evaluation")
PRECISIONS = ("float32", "bfloat16")


def measure(size: str) -> None:
    """Of this process: read an action and a precision, do it, write its seconds."""
    from dataclasses import replace

    import torch

    from allattn.benchmark.config import BenchmarkConfig
    from allattn.benchmark.subject import Subject, Variant, new_model

    config = BenchmarkConfig()
    if size == "tiny":
        sizes = {"layers": 1, "width": 32, "heads": 2, "persistent_vectors": 8, "memory_length": 8}
        model_config = replace(config.model, vocabulary_size=500, cutoffs=[], **sizes)
        config = replace(config, model=model_config, batch_size=2, segment_length=8)
    model = new_model(config.model, config.seed)
    subjects = {
        precision: Subject(model, config, Variant("ours", precision), torch.device("cpu"))
        for precision in PRECISIONS
    }
    for line in sys.stdin:
        action, precision = line.split()
        began = time.perf_counter()
        getattr(subjects[precision], action)()
        print(time.perf_counter() - began, flush=True)


class Measured:
    """The process of one folder."""

    def __init__(self, folder: Path, size: str) -> None:
        command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(folder.resolve())!r}\n{CHILD}"]
        self.process = subprocess.Popen(
            [*command, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, action: str, precision: str) -> float:
        """Of one action."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(action, precision, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """No more is asked."""
        self.process.communicate()


CHILD = f"import runpy; runpy.run_path({__file__!r})['measure'](sys.argv[1])"


def ratios(before: Measured, after: Measured, rounds: int) -> dict[tuple[str, str], list[float]]:
    """AFTER's seconds over BEFORE's, one for each round, in which each goes first every other time."""
    cases = [(action, precision) for action in ACTIONS for precision in PRECISIONS]
    found: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):  # the first one is not counted: kernels and buffers are made
        for case in cases:
            order = (before, after) if turn % 2 else (after, before)
            seconds = {one: one.seconds(*case) for one in order}
            if turn:
                found[case].append(seconds[after] / seconds[before])
    return found


def main(words: list[str]) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", choices=["benchmark", "tiny"], default="benchmark")
    given = parser.parse_args(words)
    for folder in (given.before, given.after):
        if not (folder / "allattn" / "benchmark").is_dir():  # else the installed package would be measured
            parser.error(f"{folder} does not hold the package's source")
    before, after = (Measured(folder, given.size) for folder in (given.before, given.after))
    found = ratios(before, after, given.rounds)
    before.end()
    after.end()
    print("| time after / before | precision | median | quartiles |\n| --- | --- | ---: | ---: |")
    for (action, precision), taken in found.items():
        low, middle, high = quantiles(taken, n=4)
        print(f"| {action.replace('_', ' ')} | {precision} | {middle:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
