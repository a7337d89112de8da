"""Perplexity of any checkpoint, dense or pruned: allattn evaluate checkpoint=PATH [split=test]."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from omegaconf import MISSING

from allattn.commands.run_command import Command
from allattn.data.config import DataConfig, Source
from allattn.errors import InputError, first_line
from allattn.record.result import score_record
from allattn.training.artifacts import local_checkpoint
from allattn.training.checkpoint_text import corpus_of
from allattn.training.checkpoints import read_checkpoint
from allattn.training.config import EvaluationConfig, check_evaluated_distances, check_evaluation
from allattn.training.loading import checked_tokenizer, rebuild
from allattn.training.scoring import score_split


class Split(Enum):
    """Which text of the corpus."""

    train = "train"
    valid = "valid"
    test = "test"


@dataclass
class EvaluateSettings:
    """Settings of the command; the text is the checkpoint's own unless `data` names another."""

    checkpoint: str = MISSING
    split: Split = Split.test
    device: str = "cpu"
    data: DataConfig = field(default_factory=lambda: DataConfig(source=Source.checkpoint))
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Score one split exactly and print it.

    Raises:
        InputError: the checkpoint or the text cannot be used.
    """
    check_evaluation(settings.eval)
    path = local_checkpoint(settings.checkpoint)
    checkpoint = read_checkpoint(path)
    model = rebuild(checkpoint, path).model
    check_evaluated_distances(model.config, settings.eval)
    _, corpus = corpus_of(settings.data, checkpoint, checked_tokenizer(path, checkpoint))
    try:
        model.to(torch.device(settings.device))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={settings.device} cannot be used here ({first_line(error)})") from None
    result = score_split(model, corpus, settings.split.value, settings.eval, progress=True)
    print(
        f"{settings.split.value}: perplexity per word {result.word_perplexity:.4f}, "
        f"per token {result.perplexity:.4f} ({result.loss:.6f} nats, {result.bits:.6f} bits); "
        f"{result.tokens:,} tokens, {result.words:,} words scored; "
        f"heads per layer {model.config.heads_present}"
    )
    return score_record(result)


COMMAND = Command("evaluate", EvaluateSettings, evaluate)
