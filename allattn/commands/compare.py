"""Compare pruning runs: allattn compare [runs=[FOLDER,...]] or --wandb ENTITY/PROJECT --group G."""

import difflib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from allattn.commands.overrides import quoted
from allattn.commands.run_command import Command
from allattn.comparison.compared_run import ComparedRun, FinishedRun, LeftOut
from allattn.comparison.curves import At
from allattn.comparison.page import html_page
from allattn.comparison.pictures import draw_pictures
from allattn.comparison.report import write_files
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.runs_wandb import read_wandb_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import csv_tables, notes, text_tables
from allattn.comparison.text_tables import latex_tables, markdown_tables, terminal_tables
from allattn.comparison.upload import Destination, check_can_log, destination_of, log_summary_run
from allattn.comparison.wandb_report import check_can_report, save_report
from allattn.errors import InputError
from allattn.pictures.drawing import svg
from allattn.training.config import WandbMode
from allattn.training.flat_names import among

FLAGS = {"--wandb": "--wandb ENTITY/PROJECT", "--group": "--group GROUP"}  # other ways to write a setting
PIPED_WIDTH = 1000  # columns where the output is no terminal, so that no cell and no note is broken


@dataclass
class CompareSettings:
    """Settings of the command."""

    runs: list[str] | None = None  # folders; runs are looked for below them. None = runs/, or W&B's
    wandb: str | None = None  # ENTITY/PROJECT to read the runs from instead
    group: str | None = None  # only the runs of this study (logger.group)
    vary: list[str] = field(default_factory=list)  # settings beside the gates' that make variants
    at: At = At.heads  # the size at which methods are compared
    at_sparsity: float | None = None  # that size, as share of heads that are gone. None = the full method's
    folder: str = "comparison"  # receives the tables, pictures and the page
    report: bool = False  # write a W&B report of the runs read from W&B
    upload: bool = False  # log table and pictures to W&B as a summary run
    logger: WandbMode = WandbMode.auto  # upload: where W&B records go


def compare_runs(settings: CompareSettings) -> Comparison:
    """Read the runs, write tables, pictures and page, print the table; the comparison.

    Raises:
        InputError: there is nothing to compare, runs do not belong into one ranking, or W&B cannot be used.
    """
    if settings.at_sparsity is not None and not 0 <= settings.at_sparsity < 1:
        raise InputError(f"at_sparsity={settings.at_sparsity}: give a share of heads, from 0 to below 1")
    if settings.report:
        check_can_report(settings.wandb)
    runs, left_out = _read(settings)
    if not any(isinstance(run, ComparedRun) for run in runs):
        _name(left_out)
        where = settings.wandb or ", ".join(settings.runs or ["runs"])
        of_group = "" if settings.group is None else f" of group {settings.group}"
        raise InputError(f"no finished pruning run{of_group} in {where}")
    _check_vary(settings.vary, runs)
    comparison = side_by_side(runs, left_out, settings.vary, settings.at, settings.at_sparsity)
    _name(comparison.left_out)
    destination = _destination(settings, comparison) if settings.upload else None
    folder = Path(settings.folder)
    pictures = _write(comparison, folder)
    _print(comparison)  # after the files: what the terminal cannot take costs none of them
    print(f"tables, pictures and report.html: {folder}", file=sys.stderr)
    if destination is not None:
        print(log_summary_run(comparison, pictures, folder, settings.logger, destination))
    if settings.report and settings.wandb is not None:
        print(save_report(comparison, settings.wandb, settings.group))
    return comparison


def _name(left_out: list[LeftOut]) -> None:
    for run in left_out:
        print(f"left out: {run.where}: {run.why}", file=sys.stderr)


def _read(settings: CompareSettings) -> tuple[list[FinishedRun], list[LeftOut]]:
    if settings.wandb is None:
        folders = list(map(Path, settings.runs or ["runs"]))
        return read_local_runs(folders, settings.group)
    if settings.runs is not None:
        raise InputError("give runs=[FOLDER,...] or wandb=ENTITY/PROJECT, not both")
    return read_wandb_runs(settings.wandb, settings.group)


def _check_vary(vary: list[str], runs: list[FinishedRun]) -> None:
    known = sorted({name for run in runs for name in run.settings})
    for wanted in vary:
        if not any(among(name, [wanted]) for name in known):
            near = difflib.get_close_matches(wanted, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"vary={wanted}: no run has this setting{hint}")


def _print(comparison: Comparison) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in terminal_tables(text_tables(comparison)):
        console.print(table)
    for note in notes(comparison):
        console.print(note, markup=False, highlight=False)
    for warning in comparison.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _write(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Write every form of the comparison; the PNG files by name."""
    figures = draw_pictures(comparison)
    vectors = {name: svg(figure, name) for name, figure in figures.items()}
    tables, said = text_tables(comparison), notes(comparison)
    texts = {
        "table.md": markdown_tables(tables, said),
        "table.tex": latex_tables(tables, said),
        **csv_tables(comparison),
        "report.html": html_page(comparison, vectors),
    }
    return write_files(folder, texts, figures, vectors)


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
