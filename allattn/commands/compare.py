"""Compare pruning runs: allattn compare [runs=[FOLDER,...]] or --wandb ENTITY/PROJECT --group G."""

import difflib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from allattn.commands.overrides import quoted
from allattn.commands.run_command import Command
from allattn.comparison.compared_run import ComparedRun, LeftOut
from allattn.comparison.comparison import Comparison, compare
from allattn.comparison.page import html_page
from allattn.comparison.pictures import draw_pictures, png, svg
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.runs_wandb import read_wandb_runs
from allattn.comparison.summary_run import Destination, check_can_log, destination_of, log_summary_run
from allattn.comparison.tables import csv_table, latex_table, markdown_table, notes, runs_csv, terminal_table
from allattn.errors import InputError
from allattn.files import write_atomically
from allattn.training.config import WandbMode

FLAGS = {"--wandb": "--wandb ENTITY/PROJECT", "--group": "--group GROUP"}  # other ways to write a setting
PIPED_WIDTH = 240  # columns where the output is no terminal, so that no cell is broken


@dataclass
class CompareSettings:
    """Settings of the command."""

    runs: list[str] | None = None  # folders; runs are looked for below them. None = runs/, or W&B's
    wandb: str | None = None  # ENTITY/PROJECT to read the runs from instead
    group: str | None = None  # only the runs of this study (logger.group)
    vary: list[str] = field(default_factory=list)  # settings beside the gates' that make variants
    folder: str = "comparison"  # receives the tables, pictures and the page
    upload: bool = False  # log table and pictures to W&B as a summary run
    logger: WandbMode = WandbMode.auto  # upload: where W&B records go


def compare_runs(settings: CompareSettings) -> Comparison:
    """Read the runs, print the table, write tables, pictures and page; the comparison.

    Raises:
        InputError: there is nothing to compare, runs do not belong into one ranking, or W&B cannot be used.
    """
    runs, left_out = _read(settings)
    for run in left_out:
        print(f"left out: {run.where}: {run.why}", file=sys.stderr)
    if not runs:
        where = settings.wandb or ", ".join(settings.runs or ["runs"])
        of_group = "" if settings.group is None else f" of group {settings.group}"
        raise InputError(f"no finished pruning run{of_group} in {where}")
    _check_vary(settings.vary, runs)
    comparison = compare(runs, left_out, settings.vary)
    destination = _destination(settings, comparison) if settings.upload else None
    _print(comparison)
    folder = Path(settings.folder)
    pictures = _write(comparison, folder)
    print(f"tables, pictures and report.html: {folder}", file=sys.stderr)
    if destination is not None:
        print(log_summary_run(comparison, pictures, folder, settings.logger, destination))
    return comparison


def _read(settings: CompareSettings) -> tuple[list[ComparedRun], list[LeftOut]]:
    if settings.wandb is None:
        folders = list(map(Path, settings.runs or ["runs"]))
        return read_local_runs(folders, settings.group)
    if settings.runs is not None:
        raise InputError("give runs=[FOLDER,...] or wandb=ENTITY/PROJECT, not both")
    return read_wandb_runs(settings.wandb, settings.group)


def _check_vary(vary: list[str], runs: list[ComparedRun]) -> None:
    known = sorted({name for run in runs for name in run.settings})
    for wanted in vary:
        if not any(name == wanted or name.startswith(f"{wanted}.") for name in known):
            near = difflib.get_close_matches(wanted, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"vary={wanted}: no run has this setting{hint}")


def _print(comparison: Comparison) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(terminal_table(comparison))
    for note in notes(comparison):
        console.print(note, markup=False, highlight=False)
    for warning in comparison.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _write(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Write every form of the comparison; the PNG files by name."""
    figures = draw_pictures(comparison)
    vectors = {name: svg(figure, name) for name, figure in figures.items()}
    images = {name: folder / f"{name}.png" for name in figures}
    texts = {
        "table.md": markdown_table(comparison),
        "table.tex": latex_table(comparison),
        "table.csv": csv_table(comparison),
        "runs.csv": runs_csv(comparison),
        "report.html": html_page(comparison, vectors),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
        for name, figure in figures.items():
            write_atomically(folder / f"{name}.svg", vectors[name])
            write_atomically(images[name], png(figure))
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be written ({error.strerror})") from None
    return images


def _destination(settings: CompareSettings, comparison: Comparison) -> Destination:
    check_can_log(settings.logger)
    if settings.wandb is None:
        return destination_of(comparison)
    entity, project = settings.wandb.split("/")
    return Destination(entity, project, settings.group)


def with_flags_as_settings(arguments: list[str]) -> list[str]:
    """`--wandb X` and `--group=X` written as Hydra's `wandb="X"` and `group="X"`.

    Raises:
        InputError: a flag has no value.
    """
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in FLAGS:
            found.append(argument)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{flag} needs a value: {FLAGS[flag]}")
            value = rest.pop(0)
        found.append(quoted(f"{flag.removeprefix('--')}={value}"))
    return found


COMMAND = Command("compare", CompareSettings, compare_runs, respelled=with_flags_as_settings)
