"""Settings of optimization, evaluation, hardware and logging."""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from allattn.errors import InputError, refuse_non_finite
from allattn.model.config import ModelConfig
from allattn.model.gated import Sizes

STRATEGIES = ("auto", "ddp", "fsdp")  # auto: one process, or ddp where there are several
CORES = ("auto", "plain", "recompute")  # attention cores: see allattn/model/cores/choose.py
PRECISIONS = ("auto", "32-true", "64-true", "bf16-mixed", "16-mixed")  # of weights and products


class OptimizerName(Enum):
    """Which optimizer updates the weights."""

    lamb = "lamb"
    adamw = "adamw"
    muon = "muon"  # for the layers' matrices; AdamW for everything else


class EvaluationMode(Enum):
    """Where the context of a scored token comes from."""

    memory = "memory"  # the segment before, as in training (the paper's)
    window = "window"  # its own window of text, read afresh with an empty memory


class Shape(Enum):
    """Learning rate after the warm-up."""

    cosine = "cosine"
    constant = "constant"


class WandbMode(Enum):
    """Where W&B records go."""

    auto = "auto"  # online with a login, offline without
    online = "online"
    offline = "offline"
    none = "none"


@dataclass
class OptimizerConfig:
    """Optimizer of the weights; gates get the same one with their own learning rate."""

    name: OptimizerName = OptimizerName.lamb
    learning_rate: float = 0.01  # peak
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    weight_decay: float = 0.0  # on matrices only: not on biases, norms, u, v or gates
    gradient_clip: float = 0.5  # largest total gradient norm; 0 = no clipping


@dataclass
class ScheduleConfig:
    """How much text a step takes, how many steps there are, and the learning rate over them."""

    batch_size: int = 192  # B: text streams over all devices and accumulation groups
    segment_length: int = 192  # T: tokens of each stream per step
    steps: int = 56_000  # optimizer updates of the whole run
    warmup_steps: int = 2_800  # updates of the linear learning-rate warm-up
    shape: Shape = Shape.cosine
    final_ratio: float = 0.1  # last learning rate / peak (cosine)
    tokens: int | None = None  # the run's length in tokens instead of steps
    warmup_tokens: int | None = None  # the warm-up's length in tokens instead of steps


@dataclass
class EvaluationConfig:
    """Exact scoring of a split: every token after the first, once."""

    rows: int = 16  # parallel rows; the result does not depend on it
    segment_length: int = 192  # tokens per forward pass; the result does not depend on it
    memory_length: int | None = None  # M in evaluation; None = the model's
    mode: EvaluationMode = EvaluationMode.memory
    context: int = 512  # window mode: tokens read before those that a window scores
    stride: int = 128  # window mode: tokens that a window scores
    interval: int = 1_000  # optimizer steps between scorings of the validation split; 0 = only at the end


@dataclass
class TrainerConfig:
    """Hardware and bookkeeping; passed on to Lightning's Trainer."""

    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"  # ddp: whole weights in every process; fsdp: a part of every weight in each
    precision: str = (
        "auto"  # bf16-mixed on a GPU that has bfloat16, 16-mixed on another one, 32-true on a CPU
    )
    accumulation: int = 1  # groups of streams per update, which stays the same; 0: as few as fit the one GPU
    log_interval: int = 50  # optimizer steps between rows of metrics
    checkpoint_interval: int = 1_000  # optimizer steps between checkpoints
    core: str = "auto"  # of attention; recompute keeps no probabilities for the backward pass, plain does
    compile: bool = False  # torch.compile the layers: for GPUs, on a CPU it is slower
    peak_flops: float | None = None  # FLOP/s of one device, for mfu; null: by the GPU's name, if it is known
    progress: bool = True  # on standard error: a bar on a terminal, else a line every log_interval


@dataclass
class LoggerConfig:
    """Metrics always go to metrics.csv in the run folder; W&B is added here.

    W&B's environment variables give what is null here (see `wandb_variables`).
    """

    wandb: WandbMode = WandbMode.auto
    project: str | None = None  # null: WANDB_PROJECT, else allattn
    entity: str | None = None
    group: str | None = None  # the study a run belongs to
    tags: list[str] = field(default_factory=list)
    upload: bool = True  # put the final checkpoint up as a W&B artifact when online


def in_steps(schedule: ScheduleConfig) -> ScheduleConfig:
    """The schedule with lengths given in tokens turned into optimizer steps, rounded up."""
    per_step = schedule.batch_size * schedule.segment_length
    steps = schedule.steps if schedule.tokens is None else math.ceil(schedule.tokens / per_step)
    warmup = schedule.warmup_steps
    if schedule.warmup_tokens is not None:
        warmup = math.ceil(schedule.warmup_tokens / per_step)
    return replace(schedule, steps=steps, warmup_steps=warmup, tokens=None, warmup_tokens=None)


def check_training(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, evaluation: EvaluationConfig, trainer: TrainerConfig
) -> None:
    """Refuse contradictory settings.

    Raises:
        InputError: names the settings that do not fit.
    """
    for name in ("batch_size", "segment_length", "steps"):
        if getattr(schedule, name) < 1:
            raise InputError(f"schedule.{name}={getattr(schedule, name)}: must be at least 1")
    if trainer.accumulation == 0 and trainer.devices * trainer.num_nodes > 1:
        raise InputError("trainer.accumulation=0, what fits, is for one device: give several a number")
    if trainer.accumulation < 0:
        raise InputError(f"trainer.accumulation={trainer.accumulation}: at least 1, or 0 for what fits")
    for name in ("devices", "num_nodes", "log_interval", "checkpoint_interval"):
        if getattr(trainer, name) < 1:
            raise InputError(f"trainer.{name}={getattr(trainer, name)}: must be at least 1")
    check_evaluation(evaluation)
    if not 0 <= schedule.warmup_steps <= schedule.steps:
        raise InputError(
            f"schedule.warmup_steps={schedule.warmup_steps} is not in 0..schedule.steps={schedule.steps}"
        )
    if not 0 <= schedule.final_ratio <= 1:
        raise InputError(f"schedule.final_ratio={schedule.final_ratio}: must lie in [0, 1]")
    parts = max(1, trainer.accumulation) * trainer.devices * trainer.num_nodes
    if schedule.batch_size % parts:
        raise InputError(
            f"schedule.batch_size={schedule.batch_size} is not divisible by trainer.accumulation * "
            f"trainer.devices * trainer.num_nodes = {parts}: every group needs the same number of streams"
        )
    if optimizer.learning_rate <= 0:
        raise InputError(f"optimizer.learning_rate={optimizer.learning_rate}: must be positive")
    if len(optimizer.betas) != 2 or any(not 0 <= beta < 1 for beta in optimizer.betas):
        raise InputError(f"optimizer.betas={list(optimizer.betas)}: two numbers in [0, 1)")
    if trainer.precision not in PRECISIONS:
        raise InputError(f"trainer.precision={trainer.precision}: must be one of {', '.join(PRECISIONS)}")
    if trainer.strategy not in STRATEGIES:
        raise InputError(f"trainer.strategy={trainer.strategy}: must be one of {', '.join(STRATEGIES)}")
    if trainer.core not in CORES:
        raise InputError(f"trainer.core={trainer.core}: must be one of {', '.join(CORES)}")
    if trainer.core == "recompute" and trainer.compile:
        raise InputError(
            "trainer.core=recompute does not go with trainer.compile=true, which sees nothing inside it: "
            "take trainer.core=auto (plain when compiled) or trainer.compile=false"
        )
    if trainer.strategy == "fsdp" and trainer.precision not in ("auto", "32-true", "bf16-mixed"):
        raise InputError(
            f"trainer.strategy=fsdp does not go with trainer.precision={trainer.precision}: take 32-true or "
            "bf16-mixed"
        )
    if trainer.peak_flops is not None and not 0 < trainer.peak_flops < math.inf:
        raise InputError(f"trainer.peak_flops={trainer.peak_flops}: must be positive and finite, or null")
    for group, settings in (("optimizer", optimizer), ("schedule", schedule), ("eval", evaluation)):
        refuse_non_finite(group, settings)
    for name in ("weight_decay", "gradient_clip", "eps"):
        if getattr(optimizer, name) < 0:
            raise InputError(f"optimizer.{name}={getattr(optimizer, name)}: must not be negative")


def check_evaluation(evaluation: EvaluationConfig) -> None:
    """Refuse settings that no text can be scored with.

    Raises:
        InputError: names the setting.
    """
    for name in ("rows", "segment_length", "context", "stride"):
        if getattr(evaluation, name) < 1:
            raise InputError(f"eval.{name}={getattr(evaluation, name)}: must be at least 1")
    if evaluation.interval < 0:
        raise InputError(f"eval.interval={evaluation.interval}: must not be negative")
    if evaluation.memory_length is not None and evaluation.memory_length < 1:
        raise InputError(f"eval.memory_length={evaluation.memory_length}: must be at least 1")


def check_distances(model: Sizes, schedule: ScheduleConfig, evaluation: EvaluationConfig) -> None:
    """Refuse a memory or a segment whose distances the model has no positions for.

    Raises:
        InputError: names the setting of training or evaluation that is too long, or that needs a memory.
    """
    if not isinstance(model, ModelConfig):
        _check_context(model, schedule.segment_length, "schedule.segment_length")
    elif not model.same_length:
        reach = f"model.memory_length={model.memory_length} and schedule.segment_length"
        _check_rows(
            model, model.memory_length + schedule.segment_length, f"{reach}={schedule.segment_length}"
        )
    check_evaluated_distances(model, evaluation)


def check_evaluated_distances(model: Sizes, evaluation: EvaluationConfig) -> None:
    """The part of `check_distances` that concerns evaluation.

    Raises:
        InputError: as `check_distances`.
    """
    memory = evaluation.memory_length or model.memory_length
    if not isinstance(model, ModelConfig):
        _check_windows(model, evaluation)
    elif model.same_length:
        _check_rows(model, memory + 1, f"eval.memory_length={memory}")
    elif evaluation.mode is EvaluationMode.window:
        reach = f"eval.context={evaluation.context} and eval.stride={evaluation.stride}"
        _check_rows(model, evaluation.context + evaluation.stride, reach)
    else:
        reach = f"eval.memory_length={memory} and eval.segment_length={evaluation.segment_length}"
        _check_rows(model, memory + evaluation.segment_length, reach)


def _check_windows(model: Sizes, evaluation: EvaluationConfig) -> None:
    if evaluation.mode is not EvaluationMode.window or evaluation.memory_length is not None:
        raise InputError(
            f"a {model.family} model carries no memory from one segment to the next: set eval.mode=window "
            "with eval.context and eval.stride, and leave eval.memory_length out"
        )
    _check_context(model, evaluation.context + evaluation.stride, "eval.context + eval.stride")


def _check_context(model: Sizes, tokens: int, setting: str) -> None:
    if model.context is not None and tokens > model.context:
        raise InputError(
            f"{setting}={tokens}: the {model.family} model reads at most {model.context} tokens at once"
        )


def _check_rows(model: ModelConfig, needed: int, reach: str) -> None:
    if needed > model.position_rows:
        raise InputError(
            f"{reach}: distances 0..{needed - 1} occur but model.position_rows={model.position_rows}: lower "
            "the memory or segment length, or train with more position_rows"
        )
