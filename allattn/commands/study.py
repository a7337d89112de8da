"""Which heads of a model do nothing, and what zeroing them costs: allattn study checkpoint=PATH."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from allattn.commands.compare import PIPED_WIDTH
from allattn.commands.lm_eval import refuse_missing_files
from allattn.commands.overrides import with_lists
from allattn.commands.run_command import Command
from allattn.commands.studied import StudySettings, subject_of
from allattn.comparison.text_tables import terminal_tables
from allattn.comparison.upload import Destination, check_can_log
from allattn.head_study.config import check_study
from allattn.head_study.experiment import Study
from allattn.head_study.record import RECORD, Record, own_folder
from allattn.head_study.report import upload_report, write_report
from allattn.head_study.result import StudyResult
from allattn.head_study.subject import Subject
from allattn.head_study.tables import notes, text_tables
from allattn.settings import plain
from allattn.training.flat_names import flat

LISTS = ("mask", "score", "share", "tasks")


def study(settings: StudySettings) -> StudyResult:
    """Measure, write the folder, print the tables; the result.

    Raises:
        InputError: the settings contradict each other, or model, text or folder cannot be used.
    """
    check_study(settings)
    refuse_missing_files(settings.tasks)
    if settings.upload:
        check_can_log(settings.logger)
    folder = Path(settings.folder)
    subject, closed = subject_of(settings)
    with own_folder(folder):
        record = Record(folder / RECORD, depends_on(subject, settings))
        measured = Study(subject, settings, record, settings.progress)
        result = measured.run(closed, dict(flat(plain(settings), ".")))
        images = write_report(result, folder)
    _print(result)
    print(f"tables, pictures and report.html: {folder}", file=sys.stderr)
    if settings.upload:
        destination = Destination(settings.entity, settings.project, settings.group)
        print(upload_report(result, images, folder, settings.logger, destination))
    return result


def depends_on(subject: Subject, settings: StudySettings) -> dict[str, Any]:
    """What every measurement depends on."""
    return {
        **subject.identity,
        "calibration": subject.calibration.about(),
        "test": subject.test.about(),
        "tasks": [*settings.tasks, asdict(settings.lm_eval)] if settings.tasks else [],
        "seed": settings.seed,
    }


def _print(result: StudyResult) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    for table in terminal_tables(text_tables(result)):
        console.print(table)
    for note in notes(result):
        console.print(note, markup=False, highlight=False)


COMMAND = Command("study", StudySettings, study, respelled=partial(with_lists, names=LISTS))
