"""One model in one precision, and the actions on it that are timed."""

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.yardstick import attend_yardstick
from allattn.data.segments import Ids, SegmentStream
from allattn.model.config import ModelConfig
from allattn.model.cores.choose import CORES, attend
from allattn.model.cores.inputs import Core, CoreInputs
from allattn.model.generation import generate_tokens
from allattn.model.language_model import AllAttentionLM
from allattn.model.words import Words, words_of
from allattn.training.optimizers import clip_gradients, make_optimizer, parameter_groups

PRECISIONS = ("float32", "bfloat16")
SEGMENTS = 16  # of the text


@dataclass(frozen=True)
class Variant:
    """A way to compute the same model."""

    name: str
    precision: str = "float32"  # bfloat16: mixed, by autocast
    core: Core = attend
    compiled: bool = False


def variants(compiled: bool) -> list[Variant]:
    """Yardstick and ours, in both precisions; on request ours with compiled layers too."""
    names: list[tuple[str, Core, bool]] = [("yardstick", attend_yardstick, False), ("ours", attend, False)]
    if compiled:
        names.append(("compiled", CORES["plain"], True))
    return [Variant(name, precision, core, by) for precision in PRECISIONS for name, core, by in names]


def zipf_ids(vocabulary: int, tokens: int, seed: int) -> Ids:
    """(tokens,) words with P(rank) proportional to about 1 / (rank + 1), so that every band occurs."""
    uniform = np.random.default_rng(seed).random(tokens)
    return ((vocabulary + 1) ** uniform - 1).astype(np.int32).clip(max=vocabulary - 1)


def text(config: BenchmarkConfig, model: ModelConfig) -> SegmentStream:
    """Segments of words for the model, with natural frequencies."""
    tokens = config.batch_size * config.segment_length * SEGMENTS + config.batch_size
    assert model.vocabulary_size is not None
    ids = zipf_ids(model.vocabulary_size, tokens, config.seed)
    return SegmentStream(ids, config.batch_size, config.segment_length, total=SEGMENTS)


def new_model(config: ModelConfig, seed: int) -> AllAttentionLM:
    """A model with random weights."""
    torch.manual_seed(seed)
    return AllAttentionLM(config)


def with_heads(config: ModelConfig, heads: list[int]) -> ModelConfig:
    """These sizes with as many layers as `heads` has entries, each with its first so many heads."""
    return replace(config, layers=len(heads), heads_kept=[list(range(kept)) for kept in heads])


def layers_only(config: ModelConfig) -> ModelConfig:
    """These sizes with a small vocabulary, for measures that do not reach the embedding or the softmax."""
    return replace(config, vocabulary_size=config.width, cutoffs=[])


class Subject:
    """A copy of a model, its optimizer, text and a full memory. Every method is one timed action.

    B rows, T tokens, M memory, d width, h heads present, c head width, N persistent vectors

    Args:
        model: dense or cut; copied.
        config: sizes of the batch.
        variant: how to compute.
        device: where.
    """

    def __init__(
        self, model: AllAttentionLM, config: BenchmarkConfig, variant: Variant, device: torch.device
    ) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.variant, self.device = variant, device
        self.model.use_core(variant.core)
        if variant.compiled:
            for layer in self.model.stack:
                layer.compile()
        self.clip = config.optimizer.gradient_clip
        self.optimizer = make_optimizer(
            parameter_groups(self.model, None, config.optimizer), config.optimizer
        )
        self.text, self.read = text(config, model.config), 0
        rows, queries, width = config.batch_size, config.segment_length, model.config.width
        self._keys = model.config.memory_length + queries
        self._window = model.config.memory_length if model.config.same_length else self._keys
        self.memory = [self._normal(rows, model.config.memory_length, width) for _ in self.model.layers]
        self.x = self._normal(rows, queries, width).requires_grad_()
        self.segment = self.data()

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device)

    @cached_property
    def core_inputs(self) -> list[CoreInputs]:
        """Of each layer with heads, what it hands to its core, as leaves."""
        return [self._core_inputs(heads) for heads in self.model.config.heads_present if heads]

    def _core_inputs(self, heads: int) -> CoreInputs:
        (rows, queries, _), config = self.x.shape, self.model.config
        keys, persistent = self._keys, config.persistent_vectors
        products = [(rows, queries), (rows, keys), (rows, keys), (keys,)]
        parameters: list[tuple[int, ...]] = [(), (), (persistent,), (persistent,)]
        tensors = [self._normal(*size, heads, config.head_width).to(self._dtype) for size in products]
        tensors += [self._normal(*size, heads, config.head_width) for size in parameters]
        dropout, width = config.attention_dropout, config.head_width
        numbers = (self._window, dropout, math.sqrt(width), math.sqrt(persistent))
        return CoreInputs._make((*(x.requires_grad_() for x in tensors), *numbers))

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.variant.precision == "bfloat16" else torch.float32

    def _mixed(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def data(self) -> Words:
        """The next segment's words on the device, as a run takes them."""
        segment = self.text.micro_batch(self.read % SEGMENTS)
        self.read += 1
        return words_of(segment.inputs, segment.targets, self.model)

    def training_step(self) -> None:
        """Data, forward, backward, clipping and the optimizer's update; leaves the gradients."""
        self.optimizer.zero_grad()
        self.micro_batch()
        self.update()

    def micro_batch(self) -> None:
        """Data, forward and backward, which add to the gradients."""
        self.segment = self.data()
        self.model.train()
        with self._mixed():
            loss = self._losses().mean()
        loss.backward()

    def update(self) -> None:
        """Clip the gradients that the last training step left, and update the weights."""
        clip_gradients([p for group in self.optimizer.param_groups for p in group["params"]], self.clip)
        self.optimizer.step()

    def _losses(self) -> Tensor:
        words = self.segment
        return self.model(words.inputs, words.targets, self.memory, counts=words.counts)[0]

    def evaluation(self) -> None:
        """Score one segment."""
        self.model.eval()
        with torch.no_grad(), self._mixed():
            self._losses()

    def teacher_forward(self) -> None:
        """What a training step with this model as teacher takes beside its own: `distill.weight` above 0."""
        self.model.eval()
        with torch.no_grad(), self._mixed():
            self.model.first_level(self.segment.inputs, self.memory, self.segment.counts)

    def generated_token(self) -> None:
        """The next token of a text that is written on, the likeliest one; in float32, as generate writes."""
        self.model.eval()
        next(self._written)

    @cached_property
    def _written(self) -> Iterator[int]:
        prompt = self.segment.inputs[0].tolist()
        return generate_tokens(self.model, prompt, sys.maxsize, lambda p: int(p.argmax()))

    def layers_training(self) -> None:
        """Forward and backward of the stack of layers, gradients of its parameters and input included."""
        self.model.train()
        with self._mixed():
            out = self._layers()
        self._gradients(out, [self.x, *self.model.layers.parameters(), self.model.positions.table])

    def layers_inference(self) -> None:
        """Forward of the stack of layers in evaluation."""
        self.model.eval()
        with torch.no_grad(), self._mixed():
            self._layers()

    def _layers(self) -> Tensor:
        positions, window = self.model.positions_and_window(self._keys)
        return self.model.through_layers(self.x, self.memory, positions, window)[0]

    def core_training(self) -> None:
        """Forward and backward of every layer's attention core."""
        for inputs in self.core_inputs:
            with self._mixed():
                out = self.variant.core(inputs)
            self._gradients(out, list(inputs.tensors))

    def softmax_training(self) -> None:
        """Forward and backward of the adaptive softmax."""
        self.model.train()
        with self._mixed():
            out = self.model.softmax(self.x, self.segment.targets, self.model.embedding)
        self._gradients(out, [self.x, *self.model.softmax.parameters(), *self.model.embedding.parameters()])

    def embedding_training(self) -> None:
        """Forward and backward of the adaptive embedding."""
        self.model.train()
        with self._mixed():
            out = self.model.embedding(self.segment.inputs)
        self._gradients(out, list(self.model.embedding.parameters()))

    @staticmethod
    def _gradients(out: Tensor, of: list[Tensor]) -> None:
        """Compute them and let them go; the parameters' own `grad` stays."""
        wanted = [x for x in of if x.requires_grad]
        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
