"""Settings of the gates and of their schedule."""

from dataclasses import dataclass
from enum import Enum

from allattn.errors import InputError, refuse_non_finite


class Penalty(Enum):
    """The expected-L0 term of one gate."""

    stretched = "stretched"  # sigmoid(pi - beta * log(-gamma / zeta)), Louizos et al.
    hard = "hard"  # sigmoid(pi), the open probability of the rounded gate


class Selection(Enum):
    """How the heads to remove are chosen; the removal and the fine-tuning behind it are the same."""

    l0 = "l0"  # learned gates, the paper's
    random = "random"
    magnitude = "magnitude"  # norm of WO_i times the head's output norm on validation text
    gradient = "gradient"  # expected |dL / d gate| on validation text (Michel et al. 2019)


class Scope(Enum):
    """Among which heads the others than l0 choose."""

    all_layers = "all_layers"
    each_layer = "each_layer"  # the same number in every layer, as nearly as it divides


@dataclass
class GatesConfig:
    """Learned L0 gates (Shim et al., arXiv:2110.03252)."""

    lambda_max: float = 0.02  # weight of the summed penalty, in nats per token and gate
    lambda_warmup_steps: int = 4_000  # optimizer steps of lambda's linear rise from 0; 0 = full at once
    freeze_step: int = 16_000  # optimizer steps with gates; then closed heads are removed
    initial_pi: float = 2.0  # gate parameter at the start: open with probability sigmoid(pi)
    output_scaling: bool = True  # s_g = min(H / sum of gates, H); False: s_g = 1
    scale_gradient: bool = False  # let the gradient flow through s_g
    beta: float = 1 / 3  # temperature of the BinConcrete sample
    gamma: float = -0.1  # lower end of the stretch
    zeta: float = 1.1  # upper end of the stretch
    threshold: float = 0.5  # a sampled gate is open iff its stretched sample reaches this
    penalty: Penalty = Penalty.stretched
    learning_rate_ratio: float = 10.0  # gate learning rate / weight learning rate
    target_sparsity: float | None = None  # share of heads to remove: lambda is controlled to reach it
    target_gain: float = 5.0  # controlled lambda per unit of missing sparsity, in multiples of lambda_max
    selection: Selection = Selection.l0
    scope: Scope = Scope.all_layers


def check_gates(config: GatesConfig, steps: int) -> None:
    """Refuse contradictory gate settings; `steps` is the run's number of optimizer steps.

    Raises:
        InputError: names the settings that do not fit.
    """
    refuse_non_finite("gates", config)
    if config.lambda_max < 0:
        raise InputError(f"gates.lambda_max={config.lambda_max}: must not be negative")
    if config.lambda_warmup_steps < 0:
        raise InputError(f"gates.lambda_warmup_steps={config.lambda_warmup_steps}: must not be negative")
    if config.freeze_step < 1:
        raise InputError(f"gates.freeze_step={config.freeze_step}: must be at least 1")
    if config.freeze_step < config.lambda_warmup_steps:
        raise InputError(
            f"gates.freeze_step={config.freeze_step} lies before the end of "
            f"gates.lambda_warmup_steps={config.lambda_warmup_steps}: freeze later or warm up faster"
        )
    if config.freeze_step > steps:
        raise InputError(
            f"gates.freeze_step={config.freeze_step} lies beyond schedule.steps={steps}: "
            "freeze earlier or train longer"
        )
    target = config.target_sparsity
    if target is not None and not 0 <= target < 1:
        raise InputError(f"gates.target_sparsity={target}: must lie in [0, 1)")
    if target is None and config.selection is not Selection.l0:
        raise InputError(
            f"gates.selection={config.selection.value} needs gates.target_sparsity, the share of heads to go"
        )
    if config.scope is not Scope.all_layers and config.selection is Selection.l0:
        raise InputError(f"gates.scope={config.scope.value} has no effect with gates.selection=l0")
    if target is not None and config.lambda_max == 0 and config.selection is Selection.l0:
        raise InputError("gates.target_sparsity needs gates.lambda_max above 0: it scales the controller")
    if config.selection is not Selection.l0 and config.freeze_step == steps:
        raise InputError(
            f"gates.selection={config.selection.value} fine-tunes for schedule.steps - gates.freeze_step "
            f"steps, but both are {steps}: train longer or freeze earlier"
        )
    if config.target_gain <= 0:
        raise InputError(f"gates.target_gain={config.target_gain}: must be positive")
    if config.beta <= 0:
        raise InputError(f"gates.beta={config.beta}: must be positive")
    if config.gamma >= 0:
        raise InputError(f"gates.gamma={config.gamma}: must be negative, or no gate can close fully")
    if config.zeta <= 1:
        raise InputError(f"gates.zeta={config.zeta}: must be above 1, or no gate can open fully")
    if not 0 < config.threshold < 1:
        raise InputError(f"gates.threshold={config.threshold}: must lie in (0, 1)")
    if config.learning_rate_ratio <= 0:
        raise InputError(f"gates.learning_rate_ratio={config.learning_rate_ratio}: must be positive")
