"""Which heads of a model do nothing, and what zeroing them costs: allattn study checkpoint=PATH."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from allattn.commands.compare import PIPED_WIDTH
from allattn.commands.lm_eval import refuse_missing_files
from allattn.commands.opened import Opened, SavedSettings, open_saved
from allattn.commands.overrides import with_lists
from allattn.commands.run_command import Command
from allattn.comparison.text_tables import terminal_tables
from allattn.comparison.upload import Destination, check_can_log
from allattn.data.config import DataConfig, Source
from allattn.errors import InputError, first_line
from allattn.families import all_attention
from allattn.files import file_hash
from allattn.head_study.config import StudyConfig, check_study
from allattn.head_study.experiment import Study
from allattn.head_study.record import RECORD, Record, own_folder
from allattn.head_study.report import upload_report, write_report
from allattn.head_study.result import StudyResult
from allattn.head_study.subject import Subject
from allattn.head_study.tables import notes, text_tables
from allattn.head_study.texts import first_tokens, in_windows, refuse_same, with_memory
from allattn.heads.all_attention import OwnModel
from allattn.heads.masks import DynamicMask
from allattn.heads.watched import HeadModel, Visitor
from allattn.settings import plain
from allattn.training.checkpoint_text import corpus_of
from allattn.training.flat_names import flat
from allattn.training.weight_files import WEIGHTS_FILE

LISTS = ("mask", "score", "share", "tasks")


@dataclass
class StudySettings(StudyConfig, SavedSettings):
    """Settings of the command; the text is the checkpoint's own unless `data` names another."""

    data: DataConfig = field(default_factory=lambda: DataConfig(source=Source.checkpoint))
    memory: bool | None = None  # of our models, carried from sequence to sequence; null = as in training


def study(settings: StudySettings) -> StudyResult:
    """Measure, write the folder, print the tables; the result.

    Raises:
        InputError: the settings contradict each other, or model, text or folder cannot be used.
    """
    memory = settings.memory is not False
    check_study(settings, memory)
    refuse_missing_files(settings.tasks)
    if settings.upload:
        check_can_log(settings.logger)
    folder = Path(settings.folder)
    subject, opened = own_subject(settings, memory)
    closed = None if settings.pruned is None else closed_heads(settings, opened)
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


def own_subject(settings: StudySettings, memory: bool) -> tuple[Subject, Opened]:
    """One of our models with its texts.

    Raises:
        InputError: the checkpoint or the text cannot be used.
    """
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    if settings.data.source is Source.checkpoint and "data" not in opened.meta:
        raise InputError(
            f"{settings.checkpoint}: an export does not say on what text it was trained; name one by "
            "data.source=wikitext103 (or another of the hub), or data.source=files data.folder=FOLDER"
        )
    ours = all_attention(opened.model, "study")
    tokenizer, config = opened.tokenizer(), ours.config
    _, corpus = corpus_of(settings.data, opened.checkpoint, tokenizer, settings.progress)
    calibration, test = (
        first_tokens(corpus.splits[part.split.value].ids, name, part.tokens, settings.length)
        for name, part in (("calibration", settings.calibration), ("test", settings.test))
    )
    if not settings.calibration.same:
        refuse_same(calibration, test)
    rows, length = settings.rows, settings.length
    if memory:
        warm_up = config.layers * config.memory_length  # then a test score does not depend on `rows`
        read = with_memory(calibration, rows, length, 0), with_memory(test, rows, length, warm_up)
    else:
        read = in_windows(calibration, rows, length), in_windows(test, rows, length)
    model = OwnModel(ours)

    def harness(batch_size: int) -> Any:
        from allattn.huggingface.harness import as_harness_model

        hash_, window = opened.meta["tokenizer_hash"], settings.lm_eval.max_length
        return as_harness_model(ours, tokenizer, hash_, batch_size, window)

    weights = file_hash(opened.path / WEIGHTS_FILE if opened.path.is_dir() else opened.path)
    tasks = partial(run_through, settings, model, harness)
    return Subject(settings.checkpoint, model, *read, tasks, {"weights": weights}), opened


def run_through(
    settings: StudySettings, model: HeadModel, harness: Callable[[int], Any], visitor: Visitor
) -> dict[str, float]:
    """The tasks' numbers with a visitor, by "task metric"; standard errors are left out.

    Args:
        settings: of the tasks.
        model: to be watched.
        harness: from texts at once to the same model as the harness takes it.
        visitor: a mask, or one that changes nothing.

    Raises:
        InputError: the extra is not installed, or a task cannot be run.
    """
    if not settings.tasks:
        return {}
    try:
        from allattn.huggingface.tasks import numbers_by_task, run_tasks
    except ImportError as error:
        raise InputError(f'{first_line(error)}; tasks= needs: pip install "allattn[lm-eval]"') from None
    how = settings.lm_eval
    # The padding of texts of several lengths is not told, and a mask by sequence would take it for text.
    together = 1 if isinstance(visitor, DynamicMask) else how.batch_size
    with model.watch(visitor):
        found = run_tasks(harness(together), settings.tasks, how.limit, how.few_shot, settings.seed, draws=0)
    return {
        f"{task} {metric}": value
        for task, numbers in numbers_by_task(found).items()
        for metric, value in numbers.items()
        if not metric.split()[0].endswith("_stderr")
    }


def closed_heads(settings: StudySettings, dense: Opened) -> list[list[int]]:
    """Of each layer, the heads that the pruned model lacks.

    Raises:
        InputError: it cannot be read, or is not of the dense model's sizes.
    """
    pruned = open_saved(str(settings.pruned), "cpu", settings.progress).model.config
    config = dense.model.config
    if (pruned.layers, pruned.heads, pruned.width) != (config.layers, config.heads, config.width):
        raise InputError(
            f"pruned={settings.pruned}: has {pruned.layers} layers of {pruned.heads} heads and width "
            f"{pruned.width}, checkpoint={settings.checkpoint} has {config.layers} of {config.heads} and "
            f"{config.width}: give the dense model that it was pruned from"
        )
    if config.heads_kept_total < config.heads_total:
        raise InputError(f"checkpoint={settings.checkpoint}: has lost heads itself: give the dense model")
    return [sorted(set(range(config.heads)) - set(pruned.kept(layer))) for layer in range(config.layers)]


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
