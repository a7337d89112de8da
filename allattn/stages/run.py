"""What both stages do with a run: take its folder, go on from its last checkpoint, fit, measure, conclude."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning.pytorch.loggers import Logger

from allattn.data.corpus import Corpus
from allattn.data.segments import EvaluationStream, WindowStream, check_lengths
from allattn.data.vocabulary import save_tokenizer
from allattn.errors import InputError
from allattn.families import sizes_from_dict
from allattn.files import user_path, write_atomically
from allattn.model.gated import GatedLM, Sizes
from allattn.pruning.objective import Objective
from allattn.pruning.phase import Phase
from allattn.record.articles import articles_record
from allattn.record.result import corpus_record, model_record
from allattn.record.result_table import print_result
from allattn.record.timing import layer_seconds_per_token
from allattn.settings import Resume, RunSettings, plain
from allattn.training.artifacts import forget_artifact
from allattn.training.checkpoints import AFTER_CUT, AFTER_GATES, cuts_done, read_resumable
from allattn.training.config import EvaluationMode
from allattn.training.distillation import NoTeacher
from allattn.training.environment import environment
from allattn.training.language_task import LanguageTask
from allattn.training.loading import build_model
from allattn.training.loggers import finish_loggers, log_result, make_loggers
from allattn.training.resumable_settings import TEXT, chosen, listed
from allattn.training.run_folder import RunFolder, open_run_folder
from allattn.training.runner import (
    fit,
    scoring_device,
    training_core,
    training_groups,
    training_precision,
)
from allattn.training.scoring import evaluation_stream, score_split
from allattn.training.wandb_variables import with_variables
from allattn.training.world import is_first_process, joined

WAIT = timedelta(minutes=30)  # for the first process, as torch's processes wait for each other
LOOK_AGAIN_SECONDS = 0.2
TIMED_SEGMENTS = 4

Settings = TypeVar("Settings", bound=RunSettings)


class Run(Generic[Settings]):
    """An open run: `begin` it on a text, `start_logging`, `fit`, `measure`, `conclude`.

    Attributes:
        settings: of the run.
        folder: where its files are.
        phases: that its checkpoints may be of.
        corpus: its text, once begun.
        record: what every checkpoint says of text and origin, once begun.
        state: the checkpoint that it goes on from; None before the first one.
        loggers: where rows of metrics go, once logging has started.
        articles: nats by article of the models scored, by name.
    """

    corpus: Corpus
    record: dict[str, Any]
    loggers: list[Logger]

    def __init__(self, settings: Settings, folder: RunFolder, phases: tuple[Phase, ...]) -> None:
        self.settings = settings
        self.folder = folder
        self.phases = phases
        self.state: dict[str, Any] | None = None
        self.articles: dict[str, Any] = {}
        self._began = time.time()
        self._parent = os.getppid()  # of a process that is not the first: the first, or a launcher
        self._open = ExitStack()

    @property
    def step(self) -> int:
        """Optimizer steps done in `state`."""
        return 0 if self.state is None else self.state["allattn"]["step"]

    @property
    def cuts(self) -> int:
        """How often heads had been removed in `state`."""
        return 0 if self.state is None else cuts_done(self.state)

    def begin(self, corpus: Corpus, record: dict[str, Any]) -> None:
        """Take the text, read the last checkpoint if there is one, and write the vocabulary beside it.

        Raises:
            InputError: the text is too short, or the checkpoint belongs to another stage, text or vocabulary.
        """
        schedule = self.settings.schedule
        tokens = {split: encoded.tokens for split, encoded in corpus.splits.items()}
        check_lengths(tokens, schedule.batch_size, schedule.segment_length)
        if self.folder.last.exists():
            self.state = read_resumable(self.folder.last)
            self._check_state(self.state["allattn"], corpus)
        if is_first_process():
            save_tokenizer(corpus.tokenizer, self.folder.tokenizer)
        self.corpus, self.record = corpus, record

    def start_logging(self, model: Sizes) -> None:
        """Write config.yaml, now that nothing is refused; open the loggers; say core and precision.

        From here on the settings say into how many groups a step of this model goes, in config.yaml a 0
        stays.

        Raises:
            InputError: as `training_groups`.
        """
        settings, trainer = self.settings, self.settings.trainer
        groups, line = training_groups(trainer, settings.schedule, settings.optimizer.name, model)
        if is_first_process():
            self.folder.write_config(plain(settings))
            print(f"attention core: {training_core(trainer)}; precision: {trainer.precision}")
            if line:
                print(line)
        about = plain(settings) | {"environment": environment(), "corpus": corpus_record(self.corpus)}
        self.loggers = make_loggers(
            settings.logger, self.folder.path, settings.name, settings.stage, settings.tags, about, self.step
        )
        self._open.enter_context(finish_loggers(self.loggers))
        self.settings = replace(settings, trainer=replace(trainer, accumulation=groups))

    def finished(self, corpus: Callable[[], Corpus]) -> dict[str, Any] | None:
        """The result of a run that is done.

        Args:
            corpus: makes its text, which is compared where the settings name it in other words.

        Raises:
            InputError: result.json is damaged, or of another text or vocabulary.
        """
        done = self.folder.finished()
        if done is not None and chosen(self.folder.changed, TEXT):
            record = done.get("corpus", {})
            hashes = (record.get("vocabulary_hash", ""), record.get("data_fingerprint", ""))
            self._check_text(self.folder.result, *hashes, corpus())
        return done

    def saved_model(self) -> GatedLM:
        """The model of `state`, with all its heads."""
        assert self.state is not None
        config = sizes_from_dict(self.state["allattn"]["model"])
        return build_model(config, self.state["state_dict"], self.folder.last)

    def task(self, model: GatedLM, objective: Objective, teacher: NoTeacher | None = None) -> LanguageTask:
        """A task on `model` with this run's settings; its checkpoints keep what `state` knows of removals."""
        settings, meta = self.settings, {} if self.state is None else self.state["allattn"]
        history = {name: meta[name] for name in AFTER_GATES | AFTER_CUT if name in meta}
        return LanguageTask(
            model,
            objective,
            settings.optimizer,
            replace(settings.schedule, steps=settings.last_step),
            settings.seed,
            settings.trainer.accumulation,
            self.record | history,
            teacher,
        )

    def fit(self, task: LanguageTask, last_step: int) -> None:
        """Train `task` from where the run stands to optimizer step `last_step`; last.ckpt holds it then."""
        if self.step < last_step:
            steps = range(self.step, last_step)
            fit(task, self.corpus, self.folder, self.settings, self.loggers, steps)

    def go_on_from(self, cuts: int) -> None:
        """Take up last.ckpt with heads removed so often: the first process has written it, the others wait.

        Raises:
            InputError: the first process has failed or ended, or has not written it for half an hour.
        """
        until = time.monotonic() + WAIT.total_seconds()
        while not self._stands_behind(cuts):
            failure = self.folder.failure
            failed = failure.exists() and failure.stat().st_mtime >= self._began  # not an earlier start's
            lost = os.getppid() != self._parent
            if failed or lost or time.monotonic() > until:
                ended = "was killed" if lost else f"has not written it for {WAIT}"
                ended = f"has failed ({failure} says why)" if failed else ended
                raise InputError(f"{self.folder.last}: the first process {ended}; start the run again")
            time.sleep(LOOK_AGAIN_SECONDS)

    def valid_segments(self, model: Sizes) -> EvaluationStream | WindowStream:
        """The validation text for a model of these sizes: memory carried, whatever the mode of evaluation.

        In windows for a model without memory.
        """
        settings = self.settings.eval
        if model.memory_length:
            settings = replace(settings, mode=EvaluationMode.memory)
        return evaluation_stream(model, self.corpus, "valid", settings)

    def measure(self, models: dict[str, GatedLM]) -> dict[str, dict[str, Any]]:
        """What the result says of each model: sizes, scores on valid and test, time of the layers.

        All on the run's device, the times in turn.
        """
        records = {name: self._score(name, model) for name, model in models.items()}
        first, *_ = models.values()
        segments = list(islice(self.valid_segments(first.config), TIMED_SEGMENTS))
        times = layer_seconds_per_token(list(models.values()), segments)
        for record, seconds in zip(records.values(), times, strict=True):
            record["layer_microseconds_per_token"] = 1e6 * seconds
        return records

    def conclude(self, about: dict[str, Any], models: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Write and print the result: what is true of every run, `about`, and the record of each model."""
        settings = self.settings
        result: dict[str, Any] = {
            "stage": settings.stage,
            "name": settings.name,
            "group": settings.logger.group,
            "tags": settings.tags,
            "seed": settings.seed,
            "environment": environment(),
            "core": training_core(settings.trainer),
            "precision": settings.trainer.precision,
            "accumulation": settings.trainer.accumulation,
            **about,
            "checkpoint": str(self.folder.last),
            "corpus": corpus_record(self.corpus),
            **models,
            "wall_seconds": time.time() - self._began,
        }
        forget_artifact(self.folder.last)
        write_atomically(self.folder.articles, json.dumps(self.articles) + "\n")
        log_result(self.loggers, result, self.folder)
        self.folder.write_result(result)  # the last: a kill before it repeats the rest
        print_result(settings.name, result["corpus"], models)
        return result

    def _score(self, name: str, model: GatedLM) -> dict[str, Any]:
        settings = self.settings
        model.to(scoring_device(settings.trainer))
        scores = {
            split: score_split(model, self.corpus, split, settings.eval, progress=settings.trainer.progress)
            for split in ("valid", "test")
        }
        self.articles[name] = articles_record(scores)
        return model_record(model, scores, settings.eval)

    def _stands_behind(self, cuts: int) -> bool:
        if not self.folder.last.exists():
            return False
        self.state = read_resumable(self.folder.last)
        return self.cuts >= cuts

    def _check_state(self, meta: dict[str, Any], corpus: Corpus) -> None:
        last = self.folder.last
        wanted = [phase.value for phase in self.phases]
        if meta["phase"] not in wanted:
            raise InputError(
                f"{last}: is of the phase {meta['phase']}, but this command goes on from "
                f"{' or '.join(wanted)}; give this run another name="
            )
        self._check_text(last, meta["tokenizer_hash"], meta["fingerprint"], corpus)
        if meta["step"] > self.settings.last_step:
            raise InputError(
                f"{last}: has done {meta['step']} steps, so it cannot end after {self.settings.last_step}: "
                "raise schedule.steps, or give this run another name="
            )

    def _check_text(self, path: Path, tokenizer_hash: str, fingerprint: str, corpus: Corpus) -> None:
        if (corpus.tokenizer_hash, corpus.fingerprint) != (tokenizer_hash, fingerprint):
            what = "text" if corpus.fingerprint != fingerprint else "vocabulary"
            why = listed(chosen(self.folder.changed, TEXT)) or "it has changed since"
            raise InputError(
                f"{path}: belongs to another {what} ({why}): bring the old one back, or give this run "
                "another name="
            )


@contextmanager
def open_run(settings: Settings, *phases: Phase) -> Iterator[Run[Settings]]:
    """The run of these settings, its folder held; `phases` are those that its checkpoints may be of.

    Raises:
        InputError: as `with_variables`, `joined` and `open_run_folder`.
    """
    trainer = replace(settings.trainer, precision=training_precision(settings.trainer))
    settings = replace(settings, logger=with_variables(settings.logger, os.environ), trainer=trainer)
    path = user_path("runs_folder", settings.runs_folder) / settings.name
    held: AbstractContextManager[RunFolder] = nullcontext(RunFolder(path))  # the first holds it for all
    with joined(settings.trainer):
        if is_first_process():
            defaults = plain(type(settings)())
            changed = settings.resume is Resume.changed
            held = open_run_folder(path, plain(settings), changed, defaults)
        with held as folder:
            run = Run(settings, folder, phases)
            with run._open:
                yield run
