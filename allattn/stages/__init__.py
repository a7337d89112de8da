"""The two stages, each a straight line from settings to result: pretraining and pruning."""

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.data.corpus import Corpus, prepare
from allattn.data.segments import check_lengths
from allattn.data.vocabulary import save_tokenizer
from allattn.errors import InputError
from allattn.model.config import ModelConfig, check_model, model_config_from_dict
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.config import Selection
from allattn.pruning.schedule import Phase, heads_to_keep
from allattn.pruning.selection import gradient_scores, keep_highest, magnitude_scores, random_scores
from allattn.pruning.surgery import cut_model, plan_removal
from allattn.randomness import generator, stream_seed
from allattn.record.result import corpus_record, model_record
from allattn.record.result_table import print_result
from allattn.record.timing import layer_seconds_per_token
from allattn.settings import PretrainSettings, PruneSettings, Resume, RunSettings, plain
from allattn.training.artifacts import forget_artifact, local_checkpoint
from allattn.training.checkpoint_text import corpus_of, text_record
from allattn.training.checkpoints import (
    file_hash,
    has_gates,
    read_checkpoint,
    read_resumable,
    write_checkpoint,
)
from allattn.training.config import EvaluationConfig, EvaluationMode, check_distances
from allattn.training.cutting import cut_checkpoint, freeze_plan
from allattn.training.environment import environment
from allattn.training.language_task import LanguageTask
from allattn.training.loading import build_model, checked_tokenizer, load_model
from allattn.training.loggers import finish_loggers, log_result, make_loggers, wandb_runs
from allattn.training.run_folder import RunFolder, is_first_process, open_run_folder, result_line
from allattn.training.runner import check_precision, fit, scoring_device
from allattn.training.scoring import Score, evaluation_stream, score_split

TIMED_SEGMENTS = 4


def pretrain(settings: PretrainSettings) -> dict[str, Any]:
    """Train a dense model, score it on valid and test, write result.json; the result.

    A finished run in the same folder is not run again; an unfinished one goes on.

    Raises:
        InputError: settings, text or run folder cannot be used.
    """
    check_precision(settings.trainer)
    with _folder(settings) as folder:
        if done := folder.finished():
            print(result_line(folder, done))
            return done
        began = time.time()
        corpus = prepare(settings.data, settings.trainer.progress)
        _check_lengths(settings, corpus)
        config = _sized(settings.model, corpus)
        state = _saved_state(folder, corpus, (Phase.pretrain,))
        if state is not None and state["allattn"]["model"] != config.to_dict():
            raise InputError(f"{folder.last}: is of a model of other sizes; give this run another name=")
        torch.manual_seed(stream_seed(settings.seed, "weights"))
        model = AllAttentionLM(config)
        start, best = (state["allattn"]["step"] if state else 0), _best(state)
        loggers = _loggers(settings, folder, corpus, Phase.pretrain.value, [], start)
        task = LanguageTask(
            model,
            settings.optimizer,
            settings.schedule,
            settings.seed,
            settings.trainer.accumulation,
            record=text_record(settings.data, corpus),
        )
        steps = settings.schedule.steps
        with finish_loggers(loggers):
            if start < steps:
                _fit(settings, task, corpus, folder, loggers, start, steps, best)
            return _conclude_pretrain(settings, corpus, folder, loggers, began)


def prune(settings: PruneSettings) -> dict[str, Any]:
    """Learn gates, remove the closed heads at the freeze, fine-tune, score, write result.json; the result.

    A finished run in the same folder is not run again; an unfinished one goes on, in either phase.

    Raises:
        InputError: settings, checkpoint, text or run folder cannot be used.
    """
    source = local_checkpoint(settings.checkpoint)
    dense = read_checkpoint(source)
    dense_hash = file_hash(source)
    if has_gates(dense):
        raise InputError(f"{source}: is from the middle of a pruning run; prune starts from a trained model")
    check_precision(settings.trainer)
    check_distances(model_config_from_dict(dense["allattn"]["model"]), settings.schedule, settings.eval)
    tokenizer = checked_tokenizer(source, dense)
    with _folder(settings) as folder:
        if done := folder.finished():
            _same_dense(folder.result, done, dense_hash)
            print(result_line(folder, done))
            return done
        began = time.time()
        data, corpus = corpus_of(settings.data, dense, tokenizer, settings.trainer.progress)
        _check_lengths(settings, corpus)
        state = _saved_state(folder, corpus, (Phase.gates, Phase.fine_tune))
        if state is not None:
            _same_dense(folder.last, state["allattn"], dense_hash)
        start = state["allattn"]["step"] if state else 0
        loggers = _loggers(settings, folder, corpus, "prune", [settings.ablation], start)
        for run in wandb_runs(loggers):
            run.uses(settings.checkpoint)
        record = text_record(data, corpus) | {"dense_hash": dense_hash}
        freeze, steps = settings.gates.freeze_step, settings.schedule.steps
        with finish_loggers(loggers):
            if settings.gates.selection is not Selection.l0:
                _fine_tune_selected(settings, state, dense, source, record, corpus, folder, loggers)
                return _conclude_prune(settings, corpus, folder, loggers, dense, source, dense_hash, began)
            if state is None or has_gates(state):
                task = _task(settings, state or dense, source, record, Phase.gates)
                if start < freeze:
                    _fit(settings, task, corpus, folder, loggers, start, freeze, _best(state))
                state = _remove_heads(folder)
                start = state["allattn"]["step"]
            if start < steps:
                history = {name: state["allattn"][name] for name in ("pi", "heads_before")}
                task = _task(settings, state, folder.last, record | history, Phase.fine_tune)
                _fit(settings, task, corpus, folder, loggers, start, steps, _best(state))
            return _conclude_prune(settings, corpus, folder, loggers, dense, source, dense_hash, began)


def _fine_tune_selected(
    settings: PruneSettings,
    state: dict[str, Any] | None,
    dense: dict[str, Any],
    source: Path,
    record: dict[str, Any],
    corpus: Corpus,
    folder: RunFolder,
    loggers: list[Any],
) -> None:
    """Remove heads chosen without gates, then fine-tune for as many steps as follow a gate phase."""
    steps = settings.schedule.steps - settings.gates.freeze_step
    if state is not None:
        task = _task(settings, state, folder.last, record, Phase.fine_tune)
        start, best = state["allattn"]["step"], state["allattn"]["best"]
    else:
        task = _task(settings, dense, source, record, Phase.fine_tune)
        gates = select_heads(task.model, corpus, settings)
        plan = plan_removal(task.model.config, gates, settings.gates.output_scaling)
        print(plan)
        task.model = cut_model(task.model, plan)
        start, best = 0, float("inf")
    if start < steps:
        _fit(settings, task, corpus, folder, loggers, start, steps, best)


def select_heads(model: AllAttentionLM, corpus: Corpus, settings: PruneSettings) -> list[Tensor]:
    """0/1 gates of the heads to keep, by the chosen selection at the target sparsity."""
    gates = settings.gates
    assert gates.target_sparsity is not None
    keep = heads_to_keep(gates.target_sparsity, model.config.heads_kept_total)
    stream = evaluation_stream(model.config, corpus, "valid", _with_memory(settings.eval))
    batches = ((segment.inputs, segment.targets) for segment in stream)
    if gates.selection is Selection.random:
        scores = random_scores(model.config.heads_present, generator(settings.seed, "selection"))
    elif gates.selection is Selection.magnitude:
        scores = magnitude_scores(model, batches)
    else:
        scores = gradient_scores(model, batches)
    return keep_highest(scores, keep, gates.scope)


def _saved_state(folder: RunFolder, corpus: Corpus, phases: tuple[Phase, ...]) -> dict[str, Any] | None:
    """The run's last checkpoint, if there is one, on the same text; the vocabulary is then written beside it.

    Raises:
        InputError: the checkpoint is not of such a run, or belongs to another text or vocabulary.
    """
    state = read_resumable(folder.last) if folder.last.exists() else None
    wanted = [phase.value for phase in phases]
    if state is not None and state["allattn"]["phase"] not in wanted:
        raise InputError(
            f"{folder.last}: is of the phase {state['allattn']['phase']}, but this command goes on from "
            f"{' or '.join(wanted)}; give this run another name="
        )
    for entry, now in (("tokenizer_hash", corpus.tokenizer_hash), ("fingerprint", corpus.fingerprint)):
        if state is not None and state["allattn"][entry] != now:
            raise InputError(
                f"{folder.last}: belongs to another text or vocabulary ({entry} differs): bring the old text "
                "back, or give this run another name="
            )
    if is_first_process():
        save_tokenizer(corpus.tokenizer, folder.tokenizer)
    return state


def _same_dense(path: Path, record: dict[str, Any], dense_hash: str) -> None:
    """Refuse to take up a pruning run of another dense model.

    Raises:
        InputError: the dense checkpoint has changed since.
    """
    if record.get("dense_hash", dense_hash) != dense_hash:
        raise InputError(
            f"{path}: belongs to another dense checkpoint than checkpoint= names now (which was trained "
            "again?): bring that one back, or give this run another name="
        )


def _loggers(
    settings: RunSettings, folder: RunFolder, corpus: Corpus, job_type: str, tags: list[str], start: int
) -> list[Any]:
    about = plain(settings) | {"environment": environment(), "corpus": corpus_record(corpus)}
    tags = [*settings.logger.tags, *tags]
    return make_loggers(settings.logger, folder.path, settings.name, job_type, tags, about, start)


def _folder(settings: RunSettings) -> AbstractContextManager[RunFolder]:
    path = Path(settings.runs_folder).expanduser() / settings.name
    if not is_first_process():
        return nullcontext(RunFolder(path))  # the first process holds the folder for all
    return open_run_folder(path, plain(settings), settings.resume is Resume.changed)


def _check_lengths(settings: RunSettings, corpus: Corpus) -> None:
    tokens = {split: encoded.tokens for split, encoded in corpus.splits.items()}
    check_lengths(tokens, settings.schedule.batch_size, settings.schedule.segment_length)


def _sized(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """The model's sizes with the vocabulary's filled in."""
    config = copy.deepcopy(model)
    if config.vocabulary_size not in (None, corpus.vocabulary_size):
        raise InputError(
            f"model.vocabulary_size={config.vocabulary_size} but the tokenizer has {corpus.vocabulary_size} "
            "entries: leave model.vocabulary_size out"
        )
    config.vocabulary_size = corpus.vocabulary_size
    check_model(config)
    return config


def _best(state: dict[str, Any] | None) -> float:
    """The lowest validation loss so far, nats per token."""
    return float("inf") if state is None else state["allattn"]["best"]


def _task(
    settings: PruneSettings, checkpoint: dict[str, Any], path: Path, record: dict[str, Any], phase: Phase
) -> LanguageTask:
    """A task of the pruning stage on the weights of `checkpoint`."""
    model = build_model(
        model_config_from_dict(checkpoint["allattn"]["model"]), checkpoint["state_dict"], path
    )
    return LanguageTask(
        model,
        settings.optimizer,
        settings.schedule,
        settings.seed,
        settings.trainer.accumulation,
        settings.gates if phase is Phase.gates else None,
        phase,
        record,
    )


def _fit(
    settings: RunSettings,
    task: LanguageTask,
    corpus: Corpus,
    folder: RunFolder,
    loggers: list[Any],
    start: int,
    last_step: int,
    best: float,
) -> None:
    fit(
        task,
        corpus,
        folder,
        settings.schedule,
        settings.eval,
        settings.trainer,
        loggers,
        start,
        last_step,
        best,
    )


def _remove_heads(folder: RunFolder) -> dict[str, Any]:
    """The checkpoint of the freeze with its closed heads removed; gates.ckpt keeps the one before.

    Every process cuts for itself, which gives the same everywhere, and the first one writes; the others wait
    for it where the next fit begins.
    """
    gated = read_checkpoint(folder.last)
    if not has_gates(gated):
        return gated  # the first process was faster
    plan = freeze_plan(gated)
    cut = cut_checkpoint(gated, plan)
    cut["allattn"]["best"] = float("inf")  # dense scores do not count for the smaller model
    if is_first_process():
        write_checkpoint(folder.gates, gated)
        write_checkpoint(folder.last, cut)
        print(plan)
    return cut


def _labels(settings: RunSettings, tags: list[str]) -> dict[str, Any]:
    """What a result and a W&B run are found by, and what they were made with."""
    return {
        "name": settings.name,
        "group": settings.logger.group,
        "tags": [*settings.logger.tags, *tags],
        "seed": settings.seed,
        "environment": environment(),
    }


def _with_memory(settings: EvaluationConfig) -> EvaluationConfig:
    """The same rows and segments, memory carried: what timing and selection run on."""
    return replace(settings, mode=EvaluationMode.memory)


def _scores(model: AllAttentionLM, corpus: Corpus, settings: RunSettings) -> dict[str, Score]:
    model.to(scoring_device(settings.trainer))
    progress = settings.trainer.progress
    return {
        split: score_split(model, corpus, split, settings.eval, progress=progress)
        for split in ("valid", "test")
    }


def _conclude_pretrain(
    settings: PretrainSettings, corpus: Corpus, folder: RunFolder, loggers: list[Any], began: float
) -> dict[str, Any]:
    """Score what was saved, not what is in memory; write and print it."""
    if not is_first_process():
        return {}
    loaded = load_model(folder.last)
    model, meta = loaded.model, loaded.meta
    result: dict[str, Any] = {
        "stage": Phase.pretrain.value,
        **_labels(settings, []),
        "steps": meta["step"],
        "checkpoint": str(folder.last),
        "corpus": corpus_record(corpus),
        "dense": model_record(model, _scores(model, corpus, settings)),
        "wall_seconds": time.time() - began,
    }
    _put_up(loggers, result, folder)  # before the run counts as finished: a kill in between repeats it
    folder.write_result(result)
    print_result(settings.name, result["corpus"], {"dense": result["dense"]})
    return result


def _conclude_prune(
    settings: PruneSettings,
    corpus: Corpus,
    folder: RunFolder,
    loggers: list[Any],
    dense: dict[str, Any],
    source: Path,
    dense_hash: str,
    began: float,
) -> dict[str, Any]:
    """Score and time the dense model and what was saved beside each other; write and print it."""
    if not is_first_process():
        return {}
    models = {
        "dense": build_model(model_config_from_dict(dense["allattn"]["model"]), dense["state_dict"], source),
        "pruned": load_model(folder.last).model,
    }
    records = {name: model_record(model, _scores(model, corpus, settings)) for name, model in models.items()}
    stream = evaluation_stream(models["dense"].config, corpus, "valid", _with_memory(settings.eval))
    segments = list(islice(stream, TIMED_SEGMENTS))
    times = layer_seconds_per_token(list(models.values()), segments)
    for record, seconds in zip(records.values(), times, strict=True):
        record["layer_microseconds_per_token"] = 1e6 * seconds
    result: dict[str, Any] = {
        "stage": "prune",
        **_labels(settings, [settings.ablation]),
        "steps": settings.schedule.steps,
        "ablation": settings.ablation,
        "selection": settings.gates.selection.value,
        "scope": settings.gates.scope.value,
        "lambda_max": settings.gates.lambda_max,
        "target_sparsity": settings.gates.target_sparsity,
        "dense_hash": dense_hash,
        "checkpoint": str(folder.last),
        "corpus": corpus_record(corpus),
        **records,
        "wall_seconds": time.time() - began,
    }
    _put_up(loggers, result, folder)  # before the run counts as finished: a kill in between repeats it
    folder.write_result(result)
    print_result(settings.name, result["corpus"], records)
    return result


def _put_up(loggers: list[Any], result: dict[str, Any], folder: RunFolder) -> None:
    forget_artifact(folder.last)
    log_result(loggers, result, folder.last, folder.tokenizer)
