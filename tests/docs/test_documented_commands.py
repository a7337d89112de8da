"""Every command that README and docs show runs, at tiny sizes, or the page says why it was not run here."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import ROOT, run
from support.tiny_networks import saved

from allattn.training.run_folder import RunFolder

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "# not run here: "
ELSEWHERE = {  # what runs it
    "python -m pytest": ".ci/run",
    "python -m pip install": ".ci/run",
    "python tests/baselines.py": "tests/test_baselines.py",
    "allattn memory": "tests/commands/test_memory_command.py",
    "python tests/reliability/fault_script.py": "tests/reliability/test_faults.py",
    "allattn benchmark": "tests/benchmark/test_command.py",
    "python prune.py -m study=architectures": "tests/commands/test_studies.py",
    "allattn compare": "tests/commands/test_compare_command.py",
}
SHELL = ("export ", "cd ")
# Values that make a run tiny; they take the place of what a page gives, but for the names in KEPT.
SMALL = {
    "train": {
        "data": "files",
        "data.folder": "{text}",
        "data.minimum_count": "1",
        "model.layers": "2",
        "model.width": "16",
        "model.heads": "4",
        "model.memory_length": "4",
        "model.position_rows": "16",
        "model.cutoffs": "[]",
        "schedule.warmup_steps": "0",
    },
    "prune": {"gates.freeze_step": "2", "gates.lambda_warmup_steps": "1", "checkpoint": "{checkpoint}"},
    "prepare": {"data": "files", "data.folder": "{text}", "data.cache_folder": "{folder}/cache"},
}
RUN = {
    "runs_folder": "{folder}/runs",
    "data.cache_folder": "{folder}/cache",
    "schedule.batch_size": "4",
    "schedule.segment_length": "6",
    "schedule.steps": "4",
    "eval.rows": "3",
    "eval.segment_length": "8",
    "trainer.accelerator": "cpu",
    "trainer.progress": "false",
    "logger": "none",
}
OTHERS = {
    "checkpoint": "{checkpoint}",
    "against": "{other}",
    "folder": "{folder}/out",
    "picture": "{folder}/heads.png",
    "data.folder": "{text}",
}


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """`python train.py x` and `allattn train x` both as `train x`."""
        words = shlex.split(self.text)
        if words[:1] == ["allattn"]:
            return words[1:]
        assert words[0] == "python", f"{self.page}: {self.text}: what runs it?"
        return [words[1].removesuffix(".py"), *words[2:]]


def shown_commands() -> list[Shown]:
    """Commands of the shell blocks of all pages; `a && b` are two."""
    found = []
    for page in PAGES:
        inside = False
        for line in page.read_text(encoding="utf-8").splitlines():
            stripped = line.strip()
            if stripped.startswith("```"):
                inside = not inside and stripped == "```sh"
            elif inside and stripped and NOT_RUN not in stripped and not stripped.startswith(SHELL):
                parts = re.sub(r"\s+#.*$", "", stripped).split(" && ")
                found += [Shown(page.name, re.sub(r"^OMP_NUM_THREADS=\d ", "", part)) for part in parts]
    return found


def made_small(words: list[str], places: dict[str, str]) -> list[str]:
    """The arguments of a shown command with places that exist and sizes that take a second."""
    command, *arguments = words
    stage = command in ("train", "prune")
    small = {**SMALL.get(command, {}), **RUN} if stage else SMALL.get(command, OTHERS)
    switches = [argument for argument in arguments if "=" not in argument]
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if "seed" in given:
        given["seed"] = given["seed"].split(",")[0]  # one seed of a study shows that it runs
    if not stage and command != "prepare":
        small = {name: value for name, value in small.items() if name in given}
    if given.get("data.tokenizer") == "bpe":
        given["data.vocabulary_size"] = "300"
    if given.get("study", "").startswith(
        "ablation"
    ):  # it fixes the warm-up: as short as an experiment has it
        small |= {"experiment": "demo", "gates.freeze_step": "75", "schedule.steps": "76"}
        del small["gates.lambda_warmup_steps"]
    if stage and given.get("checkpoint", "").startswith("huggingface:"):
        window = {"eval.context": "8", "eval.stride": "8"}
        small |= {"checkpoint": "huggingface:{pretrained}", "data.folder": "{text}", **window}
    settings = given | {name: value.format(**places) for name, value in small.items()}
    return [command, *switches, *(f"{name}={value}" for name, value in settings.items())]


COMMANDS = [command for command in shown_commands() if not command.text.startswith(tuple(ELSEWHERE))]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_a_shown_command_runs(
    command: Shown, text: Path, dense: RunFolder, dense_without_dropout: RunFolder, tmp_path: Path
) -> None:
    checkpoints = {"checkpoint": str(dense.last), "other": str(dense_without_dropout.last)}
    places = {"folder": str(tmp_path), "text": str(text), "pretrained": ""} | checkpoints
    if "huggingface:" in command.text:
        places["pretrained"] = str(saved("llama", tmp_path / "llama"))
    run(tmp_path / "output", "allattn", *made_small(command.words, places))


def test_what_runs_elsewhere_is_run_there() -> None:
    shown = [command.text for command in shown_commands()]
    for beginning, where in ELSEWHERE.items():
        assert (ROOT / where).exists()
        assert any(text.startswith(beginning) for text in shown), f"no page shows {beginning}"


def test_reasons_are_given() -> None:
    """`not run here` stands with a reason, and README's two commands are run."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if "not run here" in line and "`" not in line:
                assert re.search(r"# not run here: \w", line), f"{page.name}: {line}"
    readme = PAGES[0].read_text(encoding="utf-8")
    assert readme.count(NOT_RUN) < readme.count("python ")
