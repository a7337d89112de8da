"""The language model: embedding -> L All-attention layers -> tied softmax; memory goes in and comes out."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from allattn.errors import InputError
from allattn.model.attention import AllAttention
from allattn.model.bands import BandCounts
from allattn.model.config import ModelConfig, check_model
from allattn.model.cores.choose import CORES, choose
from allattn.model.cores.inputs import Core
from allattn.model.embedding import AdaptiveEmbedding
from allattn.model.gated import GatedLM, HeadPart, Memory
from allattn.model.positions import RelativePositions
from allattn.model.softmax import TiedAdaptiveSoftmax


class AllAttentionLM(GatedLM):
    """All-attention Transformer language model, dense or cut.

    Its memory is L tensors (B, M', d): each layer's inputs at the last M' <= M positions.

    Raises:
        InputError: the configuration contradicts itself (see `check_model`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocabulary_size is None:
            raise InputError("model.vocabulary_size is not set: it is the tokenizer's size")
        check_model(config)
        self.config = config
        self.embedding = AdaptiveEmbedding(config)
        self.positions = RelativePositions(config)
        self.layers = nn.ModuleList(AllAttention(config, layer) for layer in range(config.layers))
        self.positions.requires_grad_(config.heads_kept_total > 0)
        self.output_dropout = nn.Dropout(config.output_dropout)
        self.softmax = TiedAdaptiveSoftmax(config)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.positions.table.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.positions.table.dtype

    @property
    def head_parts(self) -> dict[str, HeadPart]:
        """By name, the parameters that belong to heads, in blocks of c."""
        parts = {}
        for index, layer in enumerate(self.stack):
            heads = list(range(len(layer.heads_kept)))
            owner = [head for head in heads for _ in range(layer.head_width)]
            for name, axis in layer.HEAD_AXIS.items():
                parts[f"layers.{index}.{name}"] = HeadPart(index, axis, owner, heads)
        return parts

    @property
    def outputs(self) -> set[str]:
        """Names of the output projections of attention, and of all that has one axis: norms and biases."""
        return {name for name, p in self.named_parameters() if p.ndim == 1 or name.endswith(".output.weight")}

    @property
    def core_name(self) -> str:
        """The attention core that the model computes with where it is now."""
        names = {core: name for name, core in CORES.items()}
        return names.get(self.stack[0].core) or choose("auto", self.device, compiled=False)

    @property
    def stack(self) -> list[AllAttention]:
        """The layers, with their type."""
        return cast(list[AllAttention], list(self.layers))

    def use_core(self, core: Core) -> None:
        """Let every layer compute with `core`; a layer that was told nothing chooses one at each call."""
        for layer in self.stack:
            layer.core = core

    def empty_memory(self, rows: int) -> Memory:
        """The memory at the start of a text: L tensors (rows, 0, d)."""
        shape = (rows, 0, self.config.width)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.layers]

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        memory_length: int | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Memory]:
        """Nats (B, T) of each target and the memory after the segment, see `GatedLM`."""
        in_bands, in_tails = (None, None) if counts is None else counts
        hidden, memory = self.hidden(ids, memory, multipliers, memory_length, in_bands)
        return self.softmax(hidden, targets, self.embedding, in_tails), memory

    def with_first_level(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        """`forward` with the log-probabilities of the softmax's first level, (B, T, C), in the middle."""
        in_bands, in_tails = (None, None) if counts is None else counts
        hidden, memory = self.hidden(ids, memory, multipliers, counts=in_bands)
        return *self.softmax.with_first_level(hidden, targets, self.embedding, in_tails), memory

    def first_level(
        self, ids: Tensor, memory: Memory, counts: BandCounts | None = None
    ) -> tuple[Tensor, Memory]:
        """Log-probabilities of the softmax's first level, (B, T, C), and the new memory."""
        hidden, memory = self.hidden(ids, memory, counts=counts and counts.inputs)
        return self.softmax.first_level(hidden, self.embedding), memory

    def hidden(
        self,
        ids: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        memory_length: int | None = None,
        counts: list[int] | None = None,
    ) -> tuple[Tensor, Memory]:
        """Outputs of the last layer (B, T, d) and the new memory.

        Arguments as in `forward`; `counts` of the words of `ids` in each band.
        """
        positions, window = self.positions_and_window(memory[0].shape[1] + ids.shape[1], memory_length)
        x, after = self.through_layers(
            self.embedding(ids, counts), memory, positions, window, multipliers, memory_length
        )
        return self.output_dropout(x), after

    def positions_and_window(self, keys: int, memory_length: int | None = None) -> tuple[Tensor, int]:
        """Relative-position rows (S, d) of S keys, and how many positions before itself a query sees."""
        length = self.config.memory_length if memory_length is None else memory_length
        window = length if self.config.same_length else keys
        return self.positions(keys, window), window

    def through_layers(
        self,
        x: Tensor,
        memory: Memory,
        positions: Tensor,
        window: int,
        multipliers: list[Tensor] | None = None,
        memory_length: int | None = None,
    ) -> tuple[Tensor, Memory]:
        """The stack of layers alone: outputs of the last one (B, T, d) and the new memory.

        Args:
            x: (B, T, d) embedded words.
            memory: as in `forward`.
            positions: (S, d), S = M' + T, from `positions_and_window`.
            window: likewise.
            multipliers: as in `forward`.
            memory_length: as in `forward`.
        """
        length = self.config.memory_length if memory_length is None else memory_length
        after: Memory = []
        for index, layer in enumerate(self.layers):
            after.append(_last(memory[index], x, length))
            gate = None if multipliers is None else multipliers[index]
            x = layer(x, memory[index], positions, window, gate)
        return x, after

    def layers_alone(self, segments: Sequence[Tensor]) -> Callable[[], None]:
        """An action that puts the segments, embedded already and each with its memory, through the layers."""
        memory = self.empty_memory(len(segments[0]))
        given: list[tuple[Tensor, Memory, Tensor, int]] = []
        with torch.no_grad():
            for ids in segments:
                positions, window = self.positions_and_window(memory[0].shape[1] + ids.shape[1])
                given.append((self.embedding(ids), memory, positions, window))
                _, memory = self.through_layers(*given[-1])

        def through() -> None:
            with torch.no_grad():
                for inputs in given:
                    self.through_layers(*inputs)

        return through

    def log_probs(self, ids: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Log-probabilities of every next word, (B, T, V), and the new memory."""
        hidden, memory = self.hidden(ids, memory)
        return self.softmax.log_probs(hidden, self.embedding), memory


def sizes_only(config: ModelConfig) -> AllAttentionLM:
    """The model on the device meta: names, shapes and what is trained, no numbers."""
    with torch.device("meta"):
        return AllAttentionLM(config)


def _last(memory: Tensor, x: Tensor, length: int) -> Tensor:
    """The last `length` positions of memory and segment together, without gradient: (B, <= length, d)."""
    with torch.no_grad():
        older = memory[:, max(0, memory.shape[1] + x.shape[1] - length) :]
        return torch.cat([older.to(x.dtype), x.detach()[:, max(0, x.shape[1] - length) :]], dim=1)
