"""Pretraining: a text and sizes -> a trained dense model -> its scores."""

import copy
from functools import partial
from typing import Any

import torch

from allattn.data.corpus import Corpus, prepare
from allattn.errors import InputError
from allattn.model.config import (
    ATTENTION_ALONE,
    ModelConfig,
    check_model,
    model_config_from_dict,
    refuse_another_model,
)
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.objective import NoGates
from allattn.pruning.phase import Phase
from allattn.randomness import stream_seed
from allattn.settings import PretrainSettings
from allattn.stages.run import open_run
from allattn.training.checkpoint_text import text_record
from allattn.training.loading import load_model
from allattn.training.run_folder import result_line
from allattn.training.runner import check_precision
from allattn.training.world import is_first_process


def pretrain(settings: PretrainSettings) -> dict[str, Any]:
    """Train a dense model, score it on valid and test, write result.json; the result.

    A finished run in the same folder is not run again; an unfinished one goes on. Processes other than the
    first return an empty result.

    Raises:
        InputError: settings, text or run folder cannot be used.
    """
    check_precision(settings.trainer)
    with open_run(settings, Phase.pretrain) as run:
        text = partial(prepare, settings.data, settings.trainer.progress)
        if done := run.finished(text):
            print(result_line(run.folder, done))
            return done
        corpus = text()
        run.begin(corpus, text_record(settings.data, corpus))
        config = _sized(settings.model, corpus)
        if run.state is not None:
            saved_sizes = model_config_from_dict(run.state["allattn"]["model"])
            refuse_another_model(saved_sizes, config, run.folder.last)
        if config.family == ATTENTION_ALONE and is_first_process():
            print("model.persistent_vectors=0 and model.feed_forward=0: the layers are attention alone")
        run.start_logging(config)

        torch.manual_seed(stream_seed(settings.seed, "weights"))
        run.fit(run.task(AllAttentionLM(config), NoGates()), settings.last_step)

        if not is_first_process():
            return {}
        saved = load_model(run.folder.last)  # what was saved is scored, not what is in memory
        return run.conclude({"steps": saved.meta["step"]}, run.measure({"dense": saved.model}))


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
