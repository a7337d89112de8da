"""What training, gates and removal ask of a model, whoever made it: sizes, and a language model with gates.

    B batch rows, T tokens, h heads present in a layer, H heads of a layer before any removal, C words of the
    softmax's first level, all of them where it has one level

`ModelConfig` and `AllAttentionLM` are the one family, `allattn/pretrained` has the other; nothing after
`allattn/families.py` knows which one it works on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from allattn.model.bands import BandCounts
from allattn.model.cores.inputs import Core

Memory = list[Tensor]  # by layer (B, M', d); empty for a model without memory


class Sizes(Protocol):
    """Everything that fixes an architecture: with it and a state dict a model is rebuilt."""

    @property
    def family(self) -> str:
        """What models of this kind are called."""

    @property
    def layers(self) -> int:
        """L."""

    @property
    def heads(self) -> int:
        """H."""

    @property
    def width(self) -> int:
        """d of the residual stream."""

    @property
    def memory_length(self) -> int:
        """Positions before its segment that a query sees; 0 = the model has no memory."""

    @property
    def context(self) -> int | None:
        """Most tokens that a model without memory reads at once; None = no limit."""

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key and a value head."""

    @property
    def heads_present(self) -> list[int]:
        """h of every layer."""

    @property
    def heads_kept_total(self) -> int:
        """Heads of all layers that the model has."""

    @property
    def heads_total(self) -> int:
        """L * H."""

    @property
    def eos_ends_lines(self) -> bool:
        """Whether `<eos>` takes the place of line breaks in its text; else its tokenizer reads those."""

    @property
    def band_ends(self) -> list[int]:
        """Upper ends of the vocabulary's frequency bands; the last one is V."""

    @property
    def scale_absorbed(self) -> bool:
        """Whether s_g is already inside WO."""

    @property
    def parameters_per_head(self) -> int:
        """What the removal of one head removes."""

    @property
    def vocabulary_size(self) -> int | None:
        """V."""

    def unit_costs(self, group: bool) -> dict[str, int]:
        """`parameters` of a head, or of a group of heads with their keys and values.

        Where a cache of keys and values grows with the text also `cache_bytes_per_token`, in float32.
        """

    def layer_multiply_adds(self, layer: int) -> int:
        """Multiply-adds of one layer per token in evaluation, keys and values cached."""

    def training_multiply_adds(self, segment_length: int) -> float:
        """Multiply-adds of training per token of segments of T, twice as many backward as forward."""

    def cache_bytes_per_token(self, element: int) -> int | None:
        """Bytes of one token's keys and values, `element` bytes a number; None: other things are kept."""

    def kept(self, layer: int) -> list[int]:
        """Original indices of the heads that `layer` has."""

    def scale(self, layer: int) -> float:
        """The constant s_g of `layer`; 1.0 in a dense model."""

    def with_heads(self, kept: list[list[int]], scales: list[float]) -> Self:
        """The same with these heads and s_g."""

    def dense(self) -> Self:
        """The same with all heads, before any removal."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for a weights-only checkpoint or JSON."""


@dataclass(frozen=True)
class HeadPart:
    """A parameter of which every head has a part, alone or together with others, along one axis."""

    layer: int
    axis: int
    owner: list[int]  # along the axis: whose an element is
    of_head: list[int]  # which owner each head present needs; several heads may need the same

    def staying(self, heads: Sequence[int]) -> list[int]:
        """The places along the axis that `heads`, positions among those present, need."""
        needed = {self.of_head[head] for head in heads}
        return [place for place, owner in enumerate(self.owner) if owner in needed]


class GatedLM(nn.Module, ABC):
    """A causal language model whose heads are multiplied by gates.

    Attributes:
        config: its sizes.
        layers: one module per layer.
    """

    config: Any
    layers: nn.ModuleList

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    @property
    @abstractmethod
    def head_parts(self) -> dict[str, HeadPart]:
        """By name, the parameters that a removal of heads cuts."""

    @property
    @abstractmethod
    def outputs(self) -> set[str]:
        """Names of the output projections of attention, and of all that has one axis: norms and biases."""

    @property
    @abstractmethod
    def core_name(self) -> str:
        """What attention is computed with, where the model is now."""

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    @abstractmethod
    def use_core(self, core: Core) -> None:
        """Let the layers compute attention with `core`, where there is a choice."""

    @abstractmethod
    def empty_memory(self, rows: int) -> Memory:
        """The memory at the start of a text."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        memory_length: int | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Memory]:
        """Nats of each target and the memory after the segment.

        Args:
            ids: (B, T) int64.
            targets: (B, T) int64, the next word of each position; negative = not scored.
            memory: from the call on the segment before, or `empty_memory`.
            multipliers: per layer (h,) s_g * g_i; None = no gates.
            memory_length: M when it differs from the configuration's.
            counts: words of `ids` and `targets` by band, if they are known: nothing then waits for a GPU.

        Returns:
            (B, T) negative log-likelihoods in nats, 0 where not scored; the new memory.
        """

    @abstractmethod
    def with_first_level(
        self,
        ids: Tensor,
        targets: Tensor,
        memory: Memory,
        multipliers: list[Tensor] | None = None,
        counts: BandCounts | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        """`forward` with the log-probabilities of the softmax's first level, (B, T, C), in the middle."""

    @abstractmethod
    def first_level(
        self, ids: Tensor, memory: Memory, counts: BandCounts | None = None
    ) -> tuple[Tensor, Memory]:
        """Log-probabilities of the softmax's first level, (B, T, C), and the new memory."""

    @abstractmethod
    def layers_alone(self, segments: Sequence[Tensor]) -> Callable[[], None]:
        """An action that puts segments of ids (B, T), in order, through the layers and nothing else.

        The action computes without gradient, on inputs that are made here.
        """
