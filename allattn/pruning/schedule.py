"""Optimizer step -> lambda and phase. Steps count completed optimizer updates, never micro-batches."""

import math
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


def target_at(config: GatesConfig, step: int) -> float:
    """The target sparsity of this step: linear over the warm-up, then constant (Wang et al. 2020).

    It starts from the expected sparsity of the gates' initialization, so that the first lambda is 0.
    """
    assert config.target_sparsity is not None
    if step >= config.lambda_warmup_steps:
        return config.target_sparsity
    initial = 1 / (1 + math.exp(config.initial_pi))
    return initial + (config.target_sparsity - initial) * step / config.lambda_warmup_steps


def heads_to_keep(target_sparsity: float, heads: int) -> int:
    """The number of heads that comes nearest to a target sparsity."""
    return heads - round(target_sparsity * heads)


def lambda_at(config: GatesConfig, step: int) -> float:
    """lambda(t): linear from 0 to lambda_max over the warm-up, then constant; 0 from the freeze on."""
    if step >= config.freeze_step:
        return 0.0
    if step >= config.lambda_warmup_steps:
        return config.lambda_max
    return config.lambda_max * step / config.lambda_warmup_steps
