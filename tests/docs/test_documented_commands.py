"""Every command that README and docs show runs, at tiny sizes, or says why it was not run here."""

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.process_fixtures import Arguments
from support.processes import ROOT, run

from allattn.training.run_folder import RunFolder

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "# not run here: "
OUTSIDE = {  # what is run elsewhere, and where
    "python -m pytest": ".ci/run",
    "python -m pip install -e '.[dev]'": ".ci/run",
    "export": "the shell's own",
}
STAGES = {"train", "prune"}
TINY = (
    "model.layers=2 model.width=16 model.heads=4 model.persistent_vectors=4 model.memory_length=4 "
    "model.position_rows=16 model.cutoffs=[]"
).split()
SHORT = (
    "schedule.batch_size=4 schedule.segment_length=6 schedule.steps=4 eval.rows=3 eval.segment_length=8 "
    "eval.memory_length=4 trainer.accelerator=cpu trainer.progress=false logger=none"
).split()
SHORT_GATES = "gates.freeze_step=2 gates.lambda_warmup_steps=0".split()


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def shown_commands() -> list[Shown]:
    """Lines of the shell blocks of all pages; `a && b` are two."""
    found = []
    for page in PAGES:
        inside = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            stripped = line.strip()
            if stripped.startswith("```"):
                inside = not inside and stripped == "```sh"
            elif inside and stripped and NOT_RUN not in stripped:
                parts = re.sub(r"\s+#.*$", "", stripped).split(" && ")
                found += [Shown(str(page.relative_to(ROOT)), number, part.strip()) for part in parts]
    return found


def tiny_version(words: list[str], folder: Path, text: Path, checkpoint: Path) -> list[str]:
    """The arguments of a shown command with its placeholders filled in and its sizes made small."""
    command, *arguments = words
    filled = [_filled(argument, folder, text, checkpoint) for argument in arguments]
    given = {argument.split("=")[0] for argument in filled}
    if command in STAGES:
        filled += [setting for setting in SHORT if setting.split("=")[0] not in given]
        filled += [f"runs_folder={folder / 'runs'}", f"data.cache_folder={folder / 'cache'}"]
    if command == "train":
        filled += TINY if "data.tokenizer=bpe" not in filled else TINY[:-1]
        filled = [setting for setting in filled if not setting.startswith("data=")]
        filled += ["data=files", f"data.folder={text}"]
    if command == "prune":
        filled += SHORT_GATES
    return [command, *filled]


def _filled(argument: str, folder: Path, text: Path, checkpoint: Path) -> str:
    name, equals, value = argument.partition("=")
    if name in ("checkpoint", "against"):
        return f"{name}={checkpoint}"
    value = value.replace("TEXT", str(text)).replace("FOLDER", str(text)).replace("OUT", str(folder / "out"))
    return f"{name}{equals}{value}"
