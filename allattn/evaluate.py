"""Perplexity of any checkpoint, dense or pruned: python -m allattn.evaluate checkpoint=PATH [split=test]."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf

from allattn.command import register_command, run_command
from allattn.data.config import DataConfig, Source
from allattn.data.corpus import prepare
from allattn.errors import InputError
from allattn.stages import data_of
from allattn.training.checkpoints import checked_tokenizer, load_model, read_checkpoint
from allattn.training.config import EvaluationConfig
from allattn.training.runner import evaluation_stream
from allattn.training.scoring import score


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
    path = Path(settings.checkpoint).expanduser()
    checkpoint = read_checkpoint(path)
    data = data_of(settings.data, checkpoint, checked_tokenizer(path, checkpoint))
    corpus = prepare(data)
    model = load_model(path).model.to(torch.device(settings.device))
    stream = evaluation_stream(model.config, corpus, settings.split.value, settings.eval)
    result = score(model, stream, memory_length=settings.eval.memory_length)
    kept = [len(model.config.kept(layer)) for layer in range(model.config.layers)]
    print(
        f"{settings.split.value}: perplexity {result.perplexity:.4f}, {result.loss:.6f} nats per token, "
        f"{result.tokens:,} tokens scored, heads per layer {kept}"
    )
    return asdict(result) | {"perplexity": result.perplexity}


def main(config: DictConfig) -> dict[str, Any]:
    """Check the settings and evaluate."""
    if OmegaConf.is_missing(config, "checkpoint"):
        raise InputError("python -m allattn.evaluate needs checkpoint=PATH")
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, EvaluateSettings)
    return evaluate(settings)


if __name__ == "__main__":
    run_command(main, register_command("evaluate", EvaluateSettings), None, EvaluateSettings)
