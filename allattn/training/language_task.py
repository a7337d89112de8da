"""The LightningModule of both commands: next-token loss over streams with memory, with or without gates."""

import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from allattn.data.segments import Segment
from allattn.model.language_model import AllAttentionLM, Memory
from allattn.pruning.config import GatesConfig
from allattn.pruning.gates import HeadGates
from allattn.pruning.schedule import Phase, lambda_at, target_at
from allattn.pruning.surgery import sparsity
from allattn.randomness import generator, stream_seed
from allattn.training.checkpoints import FORMAT_VERSION
from allattn.training.config import OptimizerConfig, ScheduleConfig
from allattn.training.optimizers import (
    clip_gradients,
    learning_rate_factor,
    make_optimizer,
    parameter_groups,
    set_learning_rates,
)
from allattn.training.segment_memory import by_stream, of_process
from allattn.training.sharding import average_gradients, shard


class LanguageTask(L.LightningModule):
    """Trains a model on segments, carrying each stream group's memory from step to step.

    Dropout noise is a function of (seed, process, micro-batch) and gate noise of (seed, optimizer step), so
    a resumed run repeats an uninterrupted one and every process draws the same gates.

    Args:
        model: dense or cut.
        optimizer: the weights' optimizer; `gates.learning_rate_ratio` times its rate for pi.
        schedule: learning rate over the optimizer steps.
        seed: of dropout and gate noise.
        accumulation: micro-batches, each with its own group of streams, per optimizer step.
        gates: settings of the gate phase; None = no gates (pretraining, fine-tuning after the removal).
        phase: what a run without gates is: pretraining, or fine-tuning after the removal.
        record: plain values about the run (data, vocabulary hash) that every checkpoint carries.
    """

    def __init__(
        self,
        model: AllAttentionLM,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        seed: int,
        accumulation: int = 1,
        gates: GatesConfig | None = None,
        phase: Phase = Phase.pretrain,
        record: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.gates: HeadGates | None = None
        if gates is not None:
            config = model.config
            scales = [config.scale(layer) for layer in range(config.layers)]
            self.gates = HeadGates(gates, config.heads_present, config.heads, scales)
        self.optimizer_config = optimizer
        self.schedule = schedule
        self.seed = seed
        self.accumulation = accumulation
        self.phase = Phase.gates if gates is not None else phase
        self.record = record or {}
        self.memory: dict[int, Memory] = {}  # of this process, by accumulation group of streams
        self._tokens_before = (
            0  # more than B * T times the steps, where earlier steps took other numbers of tokens
        )
        self.best = math.inf  # lowest validation loss so far, nats per token
        self.last: dict[str, Any] = {}  # what the last optimizer step measured
        self.shown = ""  # beside the progress bar
        self._loss_sum: Tensor | float = 0.0

    def decided_multipliers(self) -> list[Tensor] | None:
        """Multipliers of the deterministic gates, for evaluation; None without gates."""
        return None if self.gates is None else self.gates.multipliers(self.gates.decide())

    def training_step(self, batch: Segment, batch_idx: int) -> Tensor:
        """Loss of one micro-batch in nats per token, plus lambda times the penalty."""
        step = self.global_step
        torch.manual_seed(
            stream_seed(self.seed, "dropout", self.global_rank, step * self.accumulation + batch.group)
        )
        memory = self.memory.get(batch.group)
        if memory is None or batch.starts_over:
            memory = self.model.empty_memory(len(batch.inputs))
        multipliers = None
        sampled: list[Tensor] = []
        if self.gates is not None:
            sampled = self.gates.sample(generator(self.seed, "gates", step))
            multipliers = self.gates.multipliers(sampled)
        nats, self.memory[batch.group] = self.model(batch.inputs, batch.targets, memory, multipliers)
        loss = nats.mean()
        self._loss_sum = (0.0 if batch.group == 0 else self._loss_sum) + loss.detach()
        if batch.group == self.accumulation - 1:
            self.last = {"loss": self._loss_sum / self.accumulation}
        if self.gates is None:
            return loss
        weight, penalty = self._lambda(step), self.gates.penalty()
        total = loss + weight * penalty
        if batch.group == self.accumulation - 1:
            self.last |= self._gate_metrics(sampled, weight, penalty)
            if self.gates.config.target_sparsity is not None:
                self.gates.ascend(target_at(self.gates.config, step))
        return total

    def _lambda(self, step: int) -> float | Tensor:
        """The penalty's weight: scheduled, or controlled where there is a target sparsity."""
        assert self.gates is not None
        if self.gates.config.target_sparsity is None:
            return lambda_at(self.gates.config, step)
        return self.gates.controlled_lambda(target_at(self.gates.config, step))

    def _gate_metrics(self, sampled: list[Tensor], weight: float | Tensor, penalty: Tensor) -> dict[str, Any]:
        assert self.gates is not None
        opened = torch.stack([gate.detach().sum() for gate in sampled]).sum()
        return {
            "lambda": weight,
            "penalty": penalty.detach(),
            "loss_total": self.last["loss"] + weight * penalty.detach(),
            "sparsity_sampled": 1 - opened / self.model.config.heads_total,
        }

    def step_metrics(self) -> dict[str, Any]:
        """One row about the last optimizer step; numbers are averages over processes and accumulation."""
        metrics: dict[str, Any] = {name: self._average(value) for name, value in self.last.items()}
        metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        metrics["phase"] = self.phase.value
        if self.gates is not None:
            decided = self.gates.decide()
            ratio = self.gates.config.learning_rate_ratio
            metrics["learning_rate_gates"] = metrics["learning_rate"] * ratio
            for layer, (gate, scale) in enumerate(zip(decided, self.gates.scales(decided), strict=True)):
                metrics[f"open_heads/layer_{layer:02d}"] = int(gate.sum())
                metrics[f"s_g/layer_{layer:02d}"] = float(scale)
            opened = sum(int(gate.sum()) for gate in decided)
            metrics["sparsity"] = 1 - opened / self.model.config.heads_total
        elif self.phase is Phase.fine_tune:
            config = self.model.config
            metrics |= {"lambda": 0.0, "penalty": 0.0, "loss_total": metrics["loss"]}
            metrics["sparsity"] = sparsity(config)
            for layer, heads in enumerate(config.heads_present):
                metrics[f"open_heads/layer_{layer:02d}"] = heads
                metrics[f"s_g/layer_{layer:02d}"] = config.scale(layer)
        return metrics

    def pi_metrics(self) -> dict[str, float]:
        """pi of every gate, by layer and original head index; empty without gates."""
        if self.gates is None:
            return {}
        config, values = self.model.config, self.gates.pi
        return {
            f"pi/layer_{layer:02d}/head_{head}": value
            for layer in range(config.layers)
            for head, value in zip(config.kept(layer), values[layer].tolist(), strict=True)
        }

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
            "output_scaling": self.gates.config.output_scaling if self.gates is not None else None,
            "target_sparsity": self.gates.config.target_sparsity if self.gates is not None else None,
            "memory": self._gathered_memory(),
            "segment_length": self.schedule.segment_length,
            "tokens_seen": self.tokens_seen(),
        }

    def tokens_seen(self) -> int:
        """Training tokens read so far, over all streams."""
        per_step = self.schedule.batch_size * self.schedule.segment_length
        return self._tokens_before + self.global_step * per_step

    def _gathered_memory(self) -> Memory:
        """All streams' segment memory on the CPU."""
        mine = {group: [layer.cpu() for layer in layers] for group, layers in self.memory.items()}
        gathered: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            gathered *= dist.get_world_size()
            dist.all_gather_object(gathered, mine)
        return by_stream(gathered)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the streams' memory back and go on at the same step, in any number of processes and groups.

        Another number of streams or another segment length reads the text in other places: there the memory
        begins empty, and a line says so.
        """
        meta = checkpoint["allattn"]
        step, streams, length = meta["step"], self.schedule.batch_size, self.schedule.segment_length
        self.best = meta["best"]
        self._tokens_before = meta.get("tokens_seen", step * streams * length) - step * streams * length
        memory: Memory = meta["memory"]
        saved = (len(memory[0]), meta.get("segment_length", length)) if memory else (streams, length)
        if saved != (streams, length):
            memory = []
            if self.global_rank == 0:
                print(
                    f"memory begins empty: the text is now read in {streams} streams and segments of "
                    f"{length}, until step {step} it was in {saved[0]} and {saved[1]}"
                )
        memory = [layer.to(self.trainer.strategy.root_device) for layer in memory]
        self.memory = of_process(memory, self.accumulation, self.global_rank, self.trainer.world_size)
        _count_batches(checkpoint["loops"], step * self.accumulation)

    def configure_model(self) -> None:
        """Shard the weights where the trainer's strategy does that; pi stays whole in every process."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Optimizer:
        """One optimizer; its learning rates are set before every step from the step number alone."""
        ratio = 1.0 if self.gates is None else self.gates.config.learning_rate_ratio
        groups = parameter_groups(self.model, self.gates, self.optimizer_config, ratio)
        precision = getattr(self.trainer, "precision", "32-true")
        return make_optimizer(groups, self.optimizer_config, fused=not str(precision).startswith("16"))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Set this step's learning rates; average the gradient of pi where the strategy leaves that."""
        if self.device_mesh is not None and self.gates is not None:
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


def _count_batches(loops: dict[str, Any], done: int) -> None:
    """Let Lightning's saved state say that `done` micro-batches are done, as the accumulation now counts."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        more = done - counts["ready"]
        for name in counts:
            counts[name] += more
