"""Optimizer step -> lambda and phase. Steps count completed optimizer updates, never micro-batches."""

from enum import Enum

from allattn.pruning.config import GatesConfig


class Phase(Enum):
    """Where a run is."""

    pretrain = "pretrain"
    gates = "gates"
    fine_tune = "fine_tune"


def phase_at(config: GatesConfig, step: int) -> Phase:
    """The phase of the update that follows `step` completed ones."""
    return Phase.gates if step < config.freeze_step else Phase.fine_tune


def lambda_at(config: GatesConfig, step: int) -> float:
    """lambda(t): linear from 0 to lambda_max over the warm-up, then constant; 0 from the freeze on."""
    if step >= config.freeze_step:
        return 0.0
    if step >= config.lambda_warmup_steps:
        return config.lambda_max
    return config.lambda_max * step / config.lambda_warmup_steps
