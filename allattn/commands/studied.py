"""A model, whoever made it, with its texts and tasks, as the head study takes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allattn.commands.opened import Opened, SavedSettings, device_named, open_saved
from allattn.data.config import DataConfig, Source
from allattn.data.segments import Ids
from allattn.errors import InputError, first_line
from allattn.families import all_attention
from allattn.files import file_hash
from allattn.head_study.config import StudyConfig, refuse_with_memory
from allattn.head_study.subject import Subject
from allattn.head_study.texts import first_tokens, in_windows, refuse_same, with_memory
from allattn.heads.all_attention import OwnModel
from allattn.heads.watched import HeadModel, Visitor
from allattn.training.artifacts import local_checkpoint
from allattn.training.checkpoint_text import corpus_of
from allattn.training.foreign_settings import Dtype
from allattn.training.hub_models import is_foreign
from allattn.training.weight_files import WEIGHTS_FILE

Harness = Callable[[int], Any]  # from texts at once to a model as lm-evaluation-harness takes it


@dataclass
class StudySettings(StudyConfig, SavedSettings):
    """Settings of the command; the text is the checkpoint's own unless `data` names another."""

    data: DataConfig = field(default_factory=lambda: DataConfig(source=Source.checkpoint))
    memory: bool | None = None  # of our models, carried from sequence to sequence; null = as in training


def subject_of(settings: StudySettings) -> tuple[Subject, list[list[int]] | None]:
    """What is studied, and of each layer the heads that `pruned` lacks; None where no such model is named.

    Raises:
        InputError: the checkpoint or the text cannot be used, or they do not go with the settings.
    """
    path = local_checkpoint(settings.checkpoint)
    if not is_foreign(path):
        if settings.projection is not None:
            raise InputError("projection= is for models of others; ours say where their projections are")
        if settings.memory is not False:
            refuse_with_memory(settings)
        opened = open_saved(settings.checkpoint, settings.device, settings.progress)
        closed = None if settings.pruned is None else closed_heads(settings, opened)
        return _own(settings, opened), closed
    if settings.memory:
        raise InputError("memory=true: models of others have no memory between sequences: leave it out")
    if settings.pruned is not None:
        raise InputError(
            "pruned= is of a model that gates were learned on here: it goes with our checkpoints"
        )
    return _of_others(settings, path), None


def _own(settings: StudySettings, opened: Opened) -> Subject:
    if settings.data.source is Source.checkpoint and "data" not in opened.meta:
        raise InputError(
            f"{settings.checkpoint}: an export does not say on what text it was trained; name one by "
            "data.source=wikitext103 (or another of the hub), or data.source=files data.folder=FOLDER"
        )
    ours = all_attention(opened.model, "study")
    if settings.dtype is not Dtype.auto:
        ours.to(getattr(torch, settings.dtype.value))
    tokenizer, config = opened.tokenizer(), ours.config
    _, corpus = corpus_of(settings.data, opened.checkpoint, tokenizer, settings.progress)
    texts = (corpus.splits[part.split.value].ids for part in (settings.calibration, settings.test))
    calibration, test = _checked(settings, *texts)
    rows, length = settings.rows, settings.length
    if settings.memory is not False:
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
    identity = {"weights": weights, "dtype": settings.dtype.value}
    run = partial(_run, settings, model, harness)
    return Subject(settings.checkpoint, model, *read, run, identity, several_kinds=True)


def _of_others(settings: StudySettings, folder: Path) -> Subject:
    try:
        from allattn.huggingface.opening import open_foreign
        from allattn.huggingface.texts import check_context, read_tokens, windows
    except ImportError as error:
        raise InputError(f"{settings.checkpoint}: {first_line(error)}") from None
    opened = open_foreign(folder, device_named(settings.device), settings.dtype, settings.projection)
    check_context(opened.model.config, settings.length)
    calibration, test = (
        read_tokens(settings.data, part.split.value, opened.tokenizer, part.tokens)
        for part in (settings.calibration, settings.test)
    )
    _checked(settings, calibration.ids, test.ids)
    read = [windows(text, settings.rows, settings.length) for text in (calibration, test)]

    def harness(batch_size: int) -> Any:
        from allattn.huggingface.harness import as_foreign_harness_model

        return as_foreign_harness_model(opened, batch_size, settings.lm_eval.max_length)

    identity = {
        "weights": opened.weights_hash(),
        "dtype": settings.dtype.value,
        "projection": settings.projection,
        "start": test.start,
    }
    run = partial(_run, settings, opened.model, harness)
    return Subject(settings.checkpoint, opened.model, read[0], read[1], run, identity)


def _checked(settings: StudySettings, calibration: Ids, test: Ids) -> tuple[Ids, Ids]:
    """What is read of both texts."""
    calibration = first_tokens(calibration, "calibration", settings.calibration.tokens, settings.length)
    test = first_tokens(test, "test", settings.test.tokens, settings.length)
    if not settings.calibration.same:
        refuse_same(calibration, test)
    return calibration, test


def _run(settings: StudySettings, model: HeadModel, harness: Harness, visitor: Visitor) -> dict[str, float]:
    """The tasks' numbers with a visitor, by "task metric"; standard errors are left out.

    Raises:
        InputError: the extra is not installed, or a task cannot be run.
    """
    if not settings.tasks:
        return {}
    try:
        from allattn.huggingface.harness import foreign_batch_size
        from allattn.huggingface.tasks import numbers_by_task, run_tasks
    except ImportError as error:
        raise InputError(f'{first_line(error)}; tasks= needs: pip install "allattn[lm-eval]"') from None
    how = settings.lm_eval
    together = foreign_batch_size(visitor, how.batch_size)
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
    pruned, config = (
        open_saved(str(settings.pruned), "cpu", settings.progress).model.config,
        dense.model.config,
    )
    if (pruned.layers, pruned.heads, pruned.width) != (config.layers, config.heads, config.width):
        raise InputError(
            f"pruned={settings.pruned}: has {pruned.layers} layers of {pruned.heads} heads and width "
            f"{pruned.width}, checkpoint={settings.checkpoint} has {config.layers} of {config.heads} and "
            f"{config.width}: give the dense model that it was pruned from"
        )
    if config.heads_kept_total < config.heads_total:
        raise InputError(f"checkpoint={settings.checkpoint}: has lost heads itself: give the dense model")
    return [sorted(set(range(config.heads)) - set(pruned.kept(layer))) for layer in range(config.layers)]
