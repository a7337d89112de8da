"""One fit with Lightning: from a task (and perhaps a checkpoint) to a given optimizer step."""

import logging
import signal
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from allattn.data.corpus import Corpus
from allattn.data.segments import SegmentStream
from allattn.devices import float32_products
from allattn.errors import InputError, Interrupted, first_line
from allattn.model.config import ModelConfig
from allattn.model.cores.choose import CORES, choose
from allattn.model.gated import Sizes
from allattn.training.between_steps import BetweenSteps
from allattn.training.checkpoint_io import AtomicCheckpointIO
from allattn.training.config import EvaluationConfig, OptimizerName, ScheduleConfig, TrainerConfig
from allattn.training.display import step_display
from allattn.training.fitting import GIB, fitting_groups
from allattn.training.language_task import LanguageTask
from allattn.training.restoring import watch_restoring
from allattn.training.run_folder import RunFolder
from allattn.training.scoring import Score, score_split
from allattn.training.sharding import ShardedStrategy
from allattn.training.signals import StopSignals
from allattn.training.utilization import peak_flops

# Lightning's remarks about loaders that are not DataLoaders, about its own logging, which is not used, and
# about Slurm's srun, which is one of several ways to start a run.
_BESIDE_THE_POINT = ".*(not resumable|many workers|logging interval|LeafSpec|`log_every_n_steps`|`srun`).*"
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def _trainer(**settings: Any) -> L.Trainer:
    """Lightning's Trainer; hardware that is not there is bad input.

    It is told what it would otherwise find out by itself from the environment (see `world`), queues nothing
    again, and listens to no signal: between its own listening and ours one would end the run as if finished.
    """
    try:
        trainer = L.Trainer(**settings)
    except (MisconfigurationException, ValueError) as error:
        raise InputError(f"trainer settings do not fit this machine: {first_line(error)}") from error
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def _strategy(trainer_config: TrainerConfig) -> Strategy | str:
    """What Lightning's Trainer takes."""
    if trainer_config.strategy == "fsdp":
        return ShardedStrategy(trainer_config.devices * trainer_config.num_nodes)
    return trainer_config.strategy


def scoring_device(trainer_config: TrainerConfig) -> torch.device:
    """Where one process scores a finished model: the GPU unless the settings say CPU or there is none."""
    gpu = torch.cuda.is_available() and trainer_config.accelerator in ("auto", "gpu", "cuda")
    return torch.device("cuda" if gpu else "cpu")


def training_core(trainer_config: TrainerConfig) -> str:
    """Name of the attention core that training computes with."""
    return choose(trainer_config.core, scoring_device(trainer_config), trainer_config.compile)


def training_precision(trainer_config: TrainerConfig) -> str:
    """What training computes in; auto follows the device, and fsdp, which does not go with 16-mixed."""
    if trainer_config.precision != "auto":
        return trainer_config.precision
    if scoring_device(trainer_config).type != "cuda":
        return "32-true"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true" if trainer_config.strategy == "fsdp" else "16-mixed"


def training_groups(
    trainer_config: TrainerConfig, schedule: ScheduleConfig, optimizer: OptimizerName, model: Sizes
) -> tuple[int, str]:
    """Groups of streams of an update, and a line where trainer.accumulation=0 left them open.

    They are as few as fit the GPU, on a CPU 1.

    Raises:
        InputError: as `fitting_groups`, or the step is none that can be calculated.
    """
    device = scoring_device(trainer_config)
    if trainer_config.accumulation:
        return trainer_config.accumulation, ""
    if device.type != "cuda":
        return 1, "trainer.accumulation: 1, there is no GPU to fit"
    if not isinstance(model, ModelConfig):
        raise InputError(
            f"trainer.accumulation=0: a step of a {model.family} is not calculated: give a number"
        )
    memory = torch.cuda.get_device_properties(device).total_memory
    groups, needed = fitting_groups(
        model,
        schedule.batch_size,
        schedule.segment_length,
        training_core(trainer_config),
        training_precision(trainer_config),
        optimizer,
        memory,
    )
    sizes = f"{needed / GIB:.1f} of the GPU's {memory / GIB:.1f} GiB"
    return groups, f"trainer.accumulation: {groups}, with which a step takes {sizes} by calculation"


def check_precision(trainer_config: TrainerConfig) -> None:
    """Refuse a precision that the device lacks.

    Raises:
        InputError: names the precision and the accelerator.
    """
    precision, accelerator = trainer_config.precision, trainer_config.accelerator
    gpu = scoring_device(trainer_config).type == "cuda"
    if precision == "16-mixed" and not gpu:
        raise InputError(
            f"trainer.precision=16-mixed needs a GPU, but trainer.accelerator={accelerator} means the CPU "
            "here: use bf16-mixed or 32-true"
        )
    if precision == "bf16-mixed" and gpu and not torch.cuda.is_bf16_supported():
        raise InputError(
            f"trainer.precision=bf16-mixed is not what the GPU of trainer.accelerator={accelerator} can do: "
            "use 16-mixed or 32-true"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class FitSettings(Protocol):
    """The groups of a run's settings that training needs."""

    eval: EvaluationConfig
    trainer: TrainerConfig


def _is_of_the_compiler(error: BaseException) -> bool:
    """Whether what torch.compile hands a graph on to failed, for want of a C++ compiler or otherwise."""
    from torch._dynamo.exc import BackendCompilerFailed  # seconds to import; only compiled runs have it

    return isinstance(error, BackendCompilerFailed)


def fit(
    task: LanguageTask,
    corpus: Corpus,
    folder: RunFolder,
    settings: FitSettings,
    loggers: Sequence[Logger],
    steps: range,
) -> None:
    """Train `task` over optimizer steps `steps`; where they do not begin with 0, last.ckpt holds its state.

    Raises:
        Interrupted: a signal came; everything up to the last full step is saved.
        InputError: the loss became infinite or NaN.
    """
    schedule, evaluation, trainer_config = task.schedule, settings.eval, settings.trainer
    start, last_step = steps.start, steps.stop

    device = scoring_device(trainer_config)
    peak = peak_flops(trainer_config.peak_flops, device)

    def evaluate(running: LanguageTask) -> Score:
        rank, world_size = running.global_rank, running.trainer.world_size
        gates = running.gates.decided_multipliers()
        with float32_products("highest"):  # as the finished model is scored
            return score_split(running.model, corpus, "valid", evaluation, gates, rank, world_size)

    signals = StopSignals()
    between = BetweenSteps(
        signals,
        folder,
        evaluate,
        last_step,
        trainer_config.log_interval,
        evaluation.interval,
        trainer_config.checkpoint_interval,
        schedule.batch_size * schedule.segment_length,
        peak and peak * trainer_config.devices * trainer_config.num_nodes,
    )
    shown = [step_display(start, last_step, trainer_config.log_interval)] if trainer_config.progress else []
    trainer = _trainer(
        accelerator=trainer_config.accelerator,
        devices=trainer_config.devices,
        num_nodes=trainer_config.num_nodes,
        strategy=_strategy(trainer_config),
        precision=training_precision(trainer_config),
        accumulate_grad_batches=trainer_config.accumulation,
        max_steps=last_step,
        max_epochs=-1,
        logger=list(loggers),
        callbacks=[between, *shown],
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],
        default_root_dir=folder.path / "lightning",  # never made: what Lightning looks for is not there
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    watch_restoring(trainer._checkpoint_connector, folder.last)
    task.model.use_core(CORES[training_core(trainer_config)])
    if trainer_config.compile:
        # Layers differ in head count, and each is compiled with and without gradient and full memory.
        torch._dynamo.config.recompile_limit = max(8, 8 * len(task.model.layers))
        for layer in task.model.layers:
            layer.compile()
    stream = SegmentStream(
        corpus.splits["train"].ids,
        schedule.batch_size,
        schedule.segment_length,
        schedule.steps * trainer_config.accumulation,
        start * trainer_config.accumulation,
        trainer_config.accumulation,
        trainer.global_rank,
        trainer.world_size,
    )
    products = float32_products("high") if device.type == "cuda" else nullcontext()
    with signals, products, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_BESIDE_THE_POINT)
        try:
            trainer.fit(task, stream, ckpt_path=folder.last if start else None, weights_only=True)
        except SystemExit:  # the second signal: the processes that this one started end with it
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if trainer_config.compile and _is_of_the_compiler(error):
                reason = first_line(getattr(error, "inner_exception", error))
                raise InputError(
                    f"trainer.compile=true: the layers cannot be compiled here ({reason}); install a C++ "
                    "compiler (g++), or leave trainer.compile out"
                ) from error
            if not is_out_of_memory(error):
                raise
            asked = ", with resume=changed" if folder.last.exists() else ""
            raise InputError(
                f"out of memory at step {trainer.global_step}: raise trainer.accumulation="
                f"{trainer_config.accumulation} (the same update in smaller groups), or lower "
                f"schedule.batch_size={schedule.batch_size} or schedule.segment_length="
                f"{schedule.segment_length}{asked}; {folder.last_saved()}"
            ) from error
    if signals.received is not None:
        raise Interrupted(
            signals.received,
            f"stopped by signal {signals.received} at step {trainer.global_step} and saved in "
            f"{folder.last}; the same command goes on from there",
        )
