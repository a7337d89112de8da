"""The LightningModule of both commands: losses over streams with memory, and an objective's part."""

import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from allattn.data.segments import Segment
from allattn.model.gated import GatedLM, Memory
from allattn.pruning.objective import Objective
from allattn.pruning.phase import Phase
from allattn.randomness import stream_seed
from allattn.training.checkpoints import FORMAT_VERSION
from allattn.training.config import OptimizerConfig, ScheduleConfig
from allattn.training.distillation import NoTeacher
from allattn.training.optimizers import (
    arranged,
    clip_gradients,
    lacks_moments,
    learning_rate_factor,
    make_optimizer,
    moment_names,
    parameter_groups,
    set_learning_rates,
)
from allattn.training.restoring import SectionError
from allattn.training.segment_memory import by_stream, memory_before, of_process
from allattn.training.sharding import average_gradients, shard


class LanguageTask(L.LightningModule):
    """Trains a model on segments, carrying each stream group's memory from step to step.

    Dropout noise is a function of (seed, process, micro-batch): a resumed run repeats an uninterrupted one.

    Args:
        model: dense or cut.
        objective: what gates add to the next-token loss, and whether there are any.
        optimizer: of the weights, and at the objective's `learning_rate_ratio` times their rate of pi.
        schedule: learning rate over the optimizer steps.
        seed: of dropout.
        accumulation: micro-batches, each with its own group of streams, per optimizer step.
        record: plain values about the run (data, vocabulary hash) that every checkpoint carries.
        teacher: whom the model learns from beside the text; None = no one.
    """

    def __init__(
        self,
        model: GatedLM,
        objective: Objective,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        seed: int,
        accumulation: int = 1,
        record: dict[str, Any] | None = None,
        teacher: NoTeacher | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.gates = objective  # under this name its pi is in checkpoints
        self.optimizer_config = optimizer
        self.schedule = schedule
        self.seed = seed
        self.accumulation = accumulation
        self.record = record or {}
        self.teacher = teacher or NoTeacher()  # no module: its weights are in no checkpoint
        self.memory: dict[int, Memory] = {}  # of this process, by accumulation group of streams
        self._more_tokens = 0  # read than B * T times the steps: some took other numbers of tokens
        self.best = math.inf  # lowest validation loss so far, nats per token
        self.last: dict[str, Any] = {}  # what the last optimizer step measured
        self.shown = ""  # beside the progress bar
        self._sums: dict[str, Tensor] = {}  # of the losses so far of one optimizer step

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self.gates.phase

    def transfer_batch_to_device(self, batch: Segment, device: torch.device, dataloader_idx: int) -> Segment:
        """Leave the batch where it is: its words are counted before they are copied (see `words_of`)."""
        return batch

    def training_step(self, batch: Segment, batch_idx: int) -> Tensor:
        """What one micro-batch adds to what is minimized: losses in nats per token, lambda times penalty."""
        step = self.global_step
        torch.manual_seed(
            stream_seed(self.seed, "dropout", self.global_rank, step * self.accumulation + batch.group)
        )
        memory = memory_before(self.memory, batch, self.model)
        draw = self.gates.draw(step)
        losses, self.memory[batch.group] = self.teacher.losses(self.model, batch, memory, draw.multipliers)
        sums = self._sums if batch.group else {}
        self._sums = {name: sums.get(name, 0.0) + loss.detach() for name, loss in losses.items()}
        if batch.group == self.accumulation - 1:
            means = {name: total / self.accumulation for name, total in self._sums.items()}
            self.last = means | self.gates.step_metrics(draw, self.teacher.total(means))
            self.gates.end_step(step)
        return self.teacher.total(losses) + draw.weight * draw.penalty

    def step_metrics(self) -> dict[str, Any]:
        """One row about the last optimizer step; numbers are averages over processes and accumulation."""
        row: dict[str, Any] = {name: self._average(value) for name, value in self.last.items()}
        row |= {"perplexity": math.exp(min(row["loss"], 700.0)), "phase": self.phase.value}
        return row | self.gates.metrics(row["learning_rate"])

    def _average(self, value: Any) -> float:
        if isinstance(value, Tensor):
            value = value.detach().float()
            return float(self.trainer.strategy.reduce(value, reduce_op="mean"))
        return float(value)

    def checkpoint(self) -> dict[str, Any]:
        """What a checkpoint before the first step holds: weights, and what `on_save_checkpoint` adds."""
        checkpoint: dict[str, Any] = {"state_dict": self.state_dict()}
        self.on_save_checkpoint(checkpoint)
        return checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the model and what the run needs beside Lightning's own state."""
        checkpoint["allattn"] = {
            **self.record,
            "format_version": FORMAT_VERSION,
            "model": self.model.config.to_dict(),
            "phase": self.phase.value,
            "step": self.global_step,
            "best": self.best,
            **self.gates.record(),
            "memory": _gathered(self.memory),
            "teacher_memory": _gathered(self.teacher.memory),
            "segment_length": self.schedule.segment_length,
            "tokens_seen": self.tokens_seen(),
        }

    def tokens_seen(self) -> int:
        """Training tokens read so far, over all streams."""
        per_step = self.schedule.batch_size * self.schedule.segment_length
        return self._more_tokens + self.global_step * per_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the streams' memory back and go on at the same step, in any number of processes and groups.

        Another number of streams or another segment length reads the text in other places: there the memory
        begins empty, and a line says so.
        """
        meta = checkpoint["allattn"]
        step, streams, length = meta["step"], self.schedule.batch_size, self.schedule.segment_length
        self.best = meta["best"]
        self._more_tokens = meta.get("tokens_seen", step * streams * length) - step * streams * length
        memory, teachers = meta["memory"], meta.get("teacher_memory", [])
        saved = (len(memory[0]), meta.get("segment_length", length)) if memory else (streams, length)
        if saved != (streams, length):
            memory, teachers = [], []
            if self.global_rank == 0:
                print(
                    f"memory begins empty: the text is now read in {streams} streams and segments of "
                    f"{length}, until step {step} it was in {saved[0]} and {saved[1]}"
                )
        self.memory = self._own(memory)
        self.teacher.carry_on(self._own(teachers))
        _count_batches(checkpoint["loops"], step * self.accumulation)
        groups = self._parameter_groups()
        checkpoint["optimizer_states"] = [  # the phase before, or an earlier version, trained others
            arranged(state, groups) for state in checkpoint["optimizer_states"]
        ]
        needed = moment_names(groups, self.optimizer_config)
        if any(lacks_moments(state, needed) for state in checkpoint["optimizer_states"]):
            raise SectionError("optimizer_states")

    def _own(self, memory: Memory) -> dict[int, Memory]:
        """This process's part of all streams' memory, on its device."""
        memory = [layer.to(self.trainer.strategy.root_device) for layer in memory]
        return of_process(memory, self.accumulation, self.global_rank, self.trainer.world_size)

    def on_fit_start(self) -> None:
        """The teacher computes where the model does, in its precision."""
        self.teacher.move(self.device, self.model.dtype)

    def configure_model(self) -> None:
        """Shard the weights where the trainer's strategy does that; pi stays whole in every process."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Optimizer:
        """One optimizer; its learning rates are set before every step from the step number alone."""
        precision = getattr(self.trainer, "precision", "32-true")
        fused = not str(precision).startswith("16")
        return make_optimizer(self._parameter_groups(), self.optimizer_config, fused)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        ratio = self.gates.learning_rate_ratio
        return parameter_groups(self.model, self.gates, self.optimizer_config, ratio)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Set this step's learning rates; average the gradient of pi where the strategy leaves that."""
        if self.device_mesh is not None:
            average_gradients(self.gates.parameters())
        factor = learning_rate_factor(self.schedule, self.global_step)
        set_learning_rates(optimizer, self.optimizer_config.learning_rate, factor)
        self.last["learning_rate"] = self.optimizer_config.learning_rate * factor

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the total gradient norm of weights and gates together and note what it was."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.last["gradient_norm"] = clip_gradients(parameters, self.optimizer_config.gradient_clip)


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gathered(memory: dict[int, Memory]) -> Memory:
    """All streams' memory on the CPU, from each process's own."""
    parts: list[dict[int, Memory]] = [{} for _ in range(_processes())]
    for group, layers in memory.items():
        for layer in layers:
            for part, theirs in zip(parts, _of_all_processes(layer), strict=True):
                part.setdefault(group, []).append(theirs.cpu())
    return by_stream(parts)


def _of_all_processes(mine: Tensor) -> list[Tensor]:
    """Each process's tensor, all of one shape, in order of the processes."""
    if _processes() == 1:
        return [mine]
    gathered = [torch.empty_like(mine) for _ in range(_processes())]
    dist.all_gather(gathered, mine)
    return gathered


def _count_batches(loops: dict[str, Any], done: int) -> None:
    """Let Lightning's saved state say that `done` micro-batches are done, as the accumulation now counts."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        more = done - counts["ready"]
        for name in counts:
            counts[name] += more
