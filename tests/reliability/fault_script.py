"""Kill both commands at random moments, go on, and compare with the run that nothing happened to.

    python tests/reliability/fault_script.py [--trials 30] [--seed 0]

Every fault is tried `trials` times in train.py and as often in prune.py, on the demo corpus with a tiny model
with dropout and gate noise. A run is ended up to four times, each time at a moment drawn uniformly from the
time that it has left, start-up, validation and final scoring included; then it goes on to its end. It is lost
unless every logged number, weight, optimizer moment and score is bit for bit the uninterrupted run's. An end
with a traceback is counted by itself: Ctrl-C before the command's own handler is in place gives Python's.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import last_step, run, start
from support.sameness import assert_same

from allattn.training.checkpoints import read_checkpoint
from allattn.training.run_folder import RunFolder

FAULTS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
MOST = 4  # faults in one run
SHARED = [
    "experiment=demo",
    "schedule.batch_size=4",
    "schedule.segment_length=8",
    "schedule.steps=60",
    "eval.rows=64",
    "eval.segment_length=64",
    "eval.interval=20",
    "trainer.accelerator=cpu",
    "trainer.checkpoint_interval=5",
    "trainer.log_interval=1",
    "trainer.progress=false",
    "logger=none",
]
TRAIN = [
    "schedule.warmup_steps=5",
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    "model.persistent_vectors=4",
    "model.memory_length=8",
    "model.position_rows=16",
    "model.cutoffs=[100,500]",
    "model.div=2",
]
PRUNE = [
    "gates.freeze_step=30",
    "gates.lambda_warmup_steps=5",
    "gates.lambda_max=0.005",
    "gates.initial_pi=0.1",
    "gates.learning_rate_ratio=20",
]


@dataclass
class Count:
    """What came of one fault in one command."""

    tried: int = 0
    lost: int = 0  # after these the run could not go on, or ended with other numbers
    untidy: int = 0  # these ended the process with a traceback or an unexpected status
    in_training: int = 0  # of those tried, how many came between two steps of training
    repeated: list[int] = field(default_factory=list)  # steps done again after each


class Campaign:
    """One command's uninterrupted run and everything that is tried on copies of it."""

    def __init__(self, base: Path, script: str, settings: list[str], rng: random.Random) -> None:
        self.base = base
        self.script = script
        self.settings = [*SHARED, *settings, f"runs_folder={base}", f"data.cache_folder={base.parent}/cache"]
        self.rng = rng
        self.counts = {name: Count() for name in FAULTS}
        self.runs = 0
        self.too_early = 0
        self.complaints: list[str] = []  # about runs that were lost
        self.remarks: list[str] = []  # about untidy ends
        self.whole = RunFolder(base / "whole")
        self._to_the_end(self.whole)
        began = time.monotonic()
        self._to_the_end(RunFolder(base / "again"))  # the text is encoded now
        self.duration = time.monotonic() - began
        assert_same(RunFolder(base / "again"), self.whole)

    def go(self, trials: int) -> None:
        """Try every fault `trials` times."""
        while open_faults := [name for name, count in self.counts.items() if count.tried < trials]:
            self.runs += 1
            folder = RunFolder(self.base / f"run{self.runs}")
            suffered: list[str] = []
            while len(suffered) < MOST and open_faults:
                name = self.rng.choice(open_faults)
                if not self._fault(folder, name):
                    break  # it was over before
                suffered.append(name)
                open_faults = [n for n in open_faults if self.counts[n].tried < trials]
            try:
                self._to_the_end(folder)
                assert_same(folder, self.whole)
            except AssertionError as error:
                self.complaints.append(f"{self.script}, run {self.runs}, after {suffered}: {error}")
                for name in suffered:
                    self.counts[name].lost += 1

    def _fault(self, folder: RunFolder, name: str) -> bool:
        """Start or go on, and send one signal at a random moment; whether the run was still going."""
        before = last_step(folder), _saved(folder)
        left = 1 - before[1] / 60
        moment = self.rng.uniform(0, self.duration * max(left, 0.4))
        output = self.base / "output"
        output.unlink(missing_ok=True)
        started = start(output, self.script, *self._arguments(folder))
        if started.wait_for(moment):
            self.duration *= 0.9  # the machine is faster than it was
            return False
        started.send(FAULTS[name])
        status = started.wait()
        if folder.result.exists():
            return False  # its last line was written just before
        if not output.exists():
            self.too_early += 1  # the process was still being forked: the command had not begun
            return True
        expected = {-FAULTS[name], 128 + FAULTS[name]}
        count = self.counts[name]
        count.tried += 1
        if status not in expected or "Traceback" in started.output:
            count.untidy += 1
            self.remarks.append(f"{self.script}: {name} ended it with status {status}:\n{started.output}")
        done, saved = last_step(folder), _saved(folder)
        if (done, saved) != before:  # else it came before the first step, or after the last one
            count.in_training += done < 60
            count.repeated.append(max(0, done - saved))
        return True

    def _to_the_end(self, folder: RunFolder) -> None:
        run(self.base / "output", self.script, *self._arguments(folder))

    def _arguments(self, folder: RunFolder) -> list[str]:
        return [*self.settings, f"name={folder.path.name}"]


def _saved(folder: RunFolder) -> int:
    return read_checkpoint(folder.last)["allattn"]["step"] if folder.last.exists() else 0


def table(campaigns: list[Campaign]) -> str:
    """Fault, times tried, lost, result."""
    lines = ["| fault | times tried | while training | lost | with a traceback | result |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for campaign in campaigns:
        for name, count in campaign.counts.items():
            again = (
                f"{sum(count.repeated)} steps done again, at most {max(count.repeated, default=0)} at once"
            )
            same = "same numbers, bit for bit" if not count.lost else "NOT THE SAME, see below"
            lines.append(
                f"| {name} in {campaign.script} | {count.tried} | {count.in_training} | {count.lost} "
                f"| {count.untidy} | {same}; {again} |"
            )
    return "\n".join(lines)


def try_faults(trials: int, seed: int, base: Path) -> list[Campaign]:
    """Both commands, every fault `trials` times, in folders below `base`."""
    rng = random.Random(seed)
    (base / "train").mkdir()
    (base / "prune").mkdir()
    train = Campaign(base / "train", "train.py", TRAIN, rng)
    prune = Campaign(base / "prune", "prune.py", [*PRUNE, f"checkpoint={train.whole.last}"], rng)
    for campaign in (train, prune):
        campaign.go(trials)
    return [train, prune]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=30, help="times that each fault is tried in a command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the order of the faults")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaigns = try_faults(arguments.trials, arguments.seed, Path(folder))
    print(table(campaigns))
    runs = sum(campaign.runs for campaign in campaigns)
    early = sum(campaign.too_early for campaign in campaigns)
    print(f"{early} signals came before the command had begun and are not counted")
    print(f"{runs} runs in {(time.monotonic() - began) / 60:.1f} minutes, seed {arguments.seed}")
    for campaign in campaigns:
        for line in [*campaign.complaints, *campaign.remarks]:
            print(line)
    sys.exit(any(campaign.complaints for campaign in campaigns))


if __name__ == "__main__":
    main()
