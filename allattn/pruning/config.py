"""Settings of the gates, of their schedule, and of learning from the dense model."""

from dataclasses import dataclass
from enum import Enum

from allattn.errors import InputError, refuse_non_finite
from allattn.heads.ranking import Scope
from allattn.heads.scores import SCORES


class Penalty(Enum):
    """The expected-L0 term of one gate."""

    stretched = "stretched"  # sigmoid(pi - beta * log(-gamma / zeta)), Louizos et al.
    hard = "hard"  # sigmoid(pi), the open probability of the rounded gate


class Selection(Enum):
    """How the heads to remove are chosen; the removal and the fine-tuning behind it are the same."""

    l0 = "l0"  # learned gates, the paper's
    random = "random"
    magnitude = "magnitude"  # norm of WO_i times the head's output norm on validation text
    wanda = "wanda"
    flap = "flap"  # what the removed heads wrote on average goes into the layer's bias
    gradient = "gradient"  # expected |dL / d gate| on validation text (Michel et al. 2019)
    iterative = "iterative"  # gradient, scored anew before each of several removals with training between
    # Scores of heads/scores.py, mean over the segments of the validation text.
    awft = "awft"  # refused, as ftvvn: segments carry a memory
    aeqd = "aeqd"
    ftvvn = "ftvvn"
    avvn = "avvn"
    lthon = "lthon"
    ahon = "ahon"
    circuit_ahon = "circuit_ahon"
    awft_ln = "awft_ln"
    aeqd_ln = "aeqd_ln"
    ftvvn_ln = "ftvvn_ln"
    avvn_ln = "avvn_ln"
    lthon_ln = "lthon_ln"
    ahon_ln = "ahon_ln"
    circuit_ahon_ln = "circuit_ahon_ln"
    lthon_hn = "lthon_hn"


class Unit(Enum):
    """What one gate opens and closes."""

    head = "head"  # a query head; keys and values go where no other head needs them
    kv_group = "kv_group"  # a key/value head with all query heads that share it


class Trained(Enum):
    """Which weights a phase trains, beside the gates where it has some."""

    all = "all"
    outputs = "outputs"  # output projections of attention, norms and biases
    gates = "gates"  # no weights, the gates alone


class Removal(Enum):
    """What becomes of the closed heads."""

    cut = "cut"  # out of weights and moments
    masked = "masked"  # multiplied by 0 from then on; for pretrained models whose heads cannot be cut


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
    scope: Scope = Scope.all_layers  # among which heads the others than l0 choose
    selection_steps: int | None = None  # optimizer steps of the others than l0; None = schedule.steps
    unit: Unit = Unit.head
    train: Trained = Trained.all  # weights trained beside the gates, before the freeze
    train_after: Trained = Trained.all  # weights trained after the removal
    removal: Removal = Removal.cut
    iterations: int = 4  # removals of the iterative selection, at equal distances from the first step on


@dataclass
class DistillConfig:
    """Learning from the dense model beside the text, see training/distillation.py."""

    weight: float = 0.0  # share of the loss that is the divergence from the dense model; 0 = off
    temperature: float = 1.0  # of both distributions in the divergence
    gates: bool = False  # in the gate phase too, and not after the removal alone


def removal_steps(config: GatesConfig, last_step: int) -> list[int]:
    """Optimizer steps after which heads are removed, in a run of `last_step` steps.

    Learned gates decide at the freeze. The others begin with a removal, so that the same number of updates
    follows or, where the selection is iterative, is shared out evenly behind each.
    """
    if config.selection is Selection.l0:
        return [config.freeze_step]
    removals = config.iterations if config.selection is Selection.iterative else 1
    return [done * last_step // removals for done in range(removals)]


def check_distill(config: DistillConfig) -> None:
    """Refuse settings that mix no loss.

    Raises:
        InputError: names the setting.
    """
    refuse_non_finite("distill", config)
    if not 0 <= config.weight <= 1:
        raise InputError(f"distill.weight={config.weight}: must lie in [0, 1]")
    if config.temperature <= 0:
        raise InputError(f"distill.temperature={config.temperature}: must be positive")


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
    learned = config.selection is Selection.l0
    if learned and config.freeze_step > steps:
        raise InputError(
            f"gates.freeze_step={config.freeze_step} lies beyond schedule.steps={steps}: "
            "freeze earlier or train longer"
        )
    target = config.target_sparsity
    if target is not None and not 0 <= target < 1:
        raise InputError(f"gates.target_sparsity={target}: must lie in [0, 1)")
    score = SCORES.get(config.selection.value)
    if score is not None and score.needs_no_memory:
        raise InputError(
            f"gates.selection={score.name} is about the first token of a text, and a segment that carries a "
            "memory has none: take another score, such as ahon_ln"
        )
    if target is None and not learned:
        raise InputError(
            f"gates.selection={config.selection.value} needs gates.target_sparsity, the share of heads to go"
        )
    if config.scope is not Scope.all_layers and learned and target is None:
        raise InputError(
            f"gates.scope={config.scope.value} with gates.selection=l0 needs gates.target_sparsity, the "
            "share of heads to go"
        )
    if config.train_after is Trained.gates and (steps > config.freeze_step or not learned):
        raise InputError(
            "gates.train_after=gates: there are none after the removal; take all or outputs, or end the run "
            f"at gates.freeze_step={config.freeze_step} with schedule.steps"
        )
    if target is not None and config.lambda_max == 0 and learned:
        raise InputError("gates.target_sparsity needs gates.lambda_max above 0: it scales the controller")
    for name in ("selection_steps", "iterations"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise InputError(f"gates.{name}={value}: must be at least 1")
    own = steps if config.selection_steps is None else config.selection_steps
    if config.selection is Selection.iterative and config.iterations > own:
        raise InputError(
            f"gates.iterations={config.iterations}: no step of {own} is left between some of the removals; "
            "take fewer, or train longer"
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
