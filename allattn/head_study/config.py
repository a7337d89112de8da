"""Settings of a head study, and what is refused before anything is loaded."""

import difflib
from dataclasses import dataclass, field

from allattn.data.config import Split
from allattn.errors import InputError
from allattn.head_study.result import Mask
from allattn.heads.scores import RANDOM, SCORES
from allattn.training.config import WandbMode
from allattn.training.foreign_settings import Dtype

ALL = "all"  # in the place of a list of scores


@dataclass
class TextConfig:
    """The text whose perplexity is measured."""

    split: Split = Split.test
    tokens: int | None = None  # its first ones; null = all


@dataclass
class CalibrationConfig(TextConfig):
    """The text that scores and thresholds are taken from."""

    split: Split = Split.train
    tokens: int | None = 16384
    same: bool = False  # let it be the test text


@dataclass
class ReadingConfig:
    """Reading the output projections WO."""

    read: bool = False
    layer: int = 0  # whose columns, rows and cosines are drawn


@dataclass
class TasksConfig:
    """How tasks of lm-evaluation-harness are run through a mask."""

    limit: int | None = None  # of the documents of a task; null = all
    few_shot: int | None = None  # solved examples before the question; null = as the task says
    max_length: int = 2048  # tokens of a window
    batch_size: int = 8  # texts at once


@dataclass
class StudyConfig:
    """What is measured."""

    dtype: Dtype = Dtype.auto  # of the weights in memory
    projection: str | None = None  # of a model of others, its output projections: LAYERS.*.NAME; null = found
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    test: TextConfig = field(default_factory=TextConfig)
    length: int = 512  # tokens of a sequence, of both texts
    rows: int = 8  # sequences at once
    mask: list[Mask] = field(default_factory=lambda: [Mask.static])
    score: list[str] = field(default_factory=lambda: [ALL])  # random is always added
    share: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.15, 0.2, 0.25, 0.3])  # of heads
    random_seeds: int = 5
    seed: int = 1  # of the random score and the rotation
    agreement: float = 0.1  # share of the lowest heads that two scores are compared by
    tasks: list[str] = field(default_factory=list)  # of the harness by name, or YAML files
    lm_eval: TasksConfig = field(default_factory=TasksConfig)
    output: ReadingConfig = field(default_factory=ReadingConfig)
    pruned: str | None = None  # a checkpoint whose heads learned gates removed from the dense one
    folder: str = "head_study"  # receives record, tables, pictures and page
    upload: bool = False  # log tables and pictures to W&B as a job of type study
    logger: WandbMode = WandbMode.auto  # upload: where W&B records go
    project: str = "allattn"  # upload: W&B's
    entity: str | None = None  # upload: W&B's; null = the login's own
    group: str | None = None  # upload: W&B's


def check_study(settings: StudyConfig) -> None:
    """Refuse what cannot be measured, whatever the model is.

    Raises:
        InputError: names the setting.
    """
    for name in ("length", "rows", "random_seeds"):
        _refuse_below(name, getattr(settings, name), 1)
    _refuse_below("seed", settings.seed, 0)
    for group, tokens in (("calibration", settings.calibration.tokens), ("test", settings.test.tokens)):
        _refuse_below(f"{group}.tokens", tokens, 1)
    for name, least in (("limit", 1), ("few_shot", 0), ("max_length", 1), ("batch_size", 1)):
        _refuse_below(f"lm_eval.{name}", getattr(settings.lm_eval, name), least)
    for name in ("mask", "score", "share"):
        if not getattr(settings, name):
            raise InputError(f"{name}= is empty: give one, or several as {name}=[...,...]")
    for share in (*settings.share, settings.agreement):
        if not 0 <= share < 1:
            name = "share" if share in settings.share else "agreement"
            raise InputError(f"{name}={share}: give a share of heads, from 0 to below 1")
    if settings.calibration.split is settings.test.split and not settings.calibration.same:
        raise InputError(
            f"calibration.split and test.split are both {settings.test.split.value}, so thresholds and ranks "
            "would be taken from the text they are tested on: choose another, or say calibration.same=true"
        )
    _check_scores(settings)


def _refuse_below(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name}={value}: must be at least {least}")


def _check_scores(settings: StudyConfig) -> None:
    for name in settings.score:
        if name not in (*SCORES, ALL):
            near = difflib.get_close_matches(name, SCORES, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"score={name}: there is no such score; {hint}there are {', '.join(SCORES)}")
    if ALL in settings.score and len(settings.score) > 1:
        raise InputError(f"score={','.join(settings.score)}: all is every score: give it alone")
    for name in settings.score if settings.score != [ALL] else ():
        if Mask.static not in settings.mask and not SCORES[name].per_sequence:
            raise InputError(
                f"score={name} is one number for a text and none for a sequence, so no dynamic mask goes by "
                "it: give mask=static, or leave it out"
            )


def refuse_with_memory(settings: StudyConfig) -> None:
    """Refuse scores that have no meaning for sequences that carry a memory.

    Raises:
        InputError: names the first one.
    """
    for name in settings.score:
        if name != ALL and SCORES[name].needs_no_memory:
            raise InputError(
                f"score={name} is about the first token of a text and has no meaning for sequences that "
                "carry a memory: leave it out, or give memory=false"
            )


def chosen_scores(settings: StudyConfig, memory: bool) -> list[str]:
    """The scores to measure, in the order of `SCORES`, random the last.

    Args:
        settings: checked.
        memory: whether sequences carry one; all scores are then all those that have a meaning.
    """
    wanted = [name for name in SCORES if settings.score == [ALL] or name in settings.score]
    usable = [name for name in wanted if name != RANDOM and not (memory and SCORES[name].needs_no_memory)]
    return [*usable, RANDOM]
