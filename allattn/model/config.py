"""Sizes of the model. With them and a state dict a model, dense or cut, is rebuilt; nothing else is needed.

Notation used in every model file:
    B batch rows, T segment length, M memory length, N persistent vectors per head, V vocabulary,
    d width, H heads, c = d / H head width, S = (memory present) + T keys in the sequence.
"""

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from allattn.errors import InputError, refuse_wrong_kinds
from allattn.model.heads_kept import HeadsKept

ATTENTION_ALONE = "attention alone"  # neither persistent vectors nor a feed-forward sublayer


@dataclass
class ModelConfig(HeadsKept):
    """Everything that fixes the architecture (paper: L=16, d=512, H=8, N=2048, M=192)."""

    vocabulary_size: int | None = None  # V; read from the tokenizer when None
    layers: int = 16  # L
    width: int = 512  # d
    heads: int = 8  # H, the original head count of a layer; stays H after removal (it defines s_g)
    persistent_vectors: int = 2048  # N per head; they take the feed-forward sublayer's place; 0 = none
    feed_forward: int = 0  # F hidden units of the feed-forward sublayer; 0 = none
    memory_length: int = 192  # M positions before a query that it may see
    position_rows: int = 512  # rows of the relative-position table; distances 0..position_rows-1 exist
    same_length: bool = True  # each query sees exactly the M positions before it; False: all there are
    cutoffs: list[int] = field(default_factory=lambda: [20_000, 40_000, 200_000])  # [] = plain tied softmax
    div: int = 4  # each further frequency band is narrower by this factor
    attention_dropout: float = 0.2  # on the attention probabilities
    projection_dropout: float = 0.1  # on a layer's output before the residual sum
    feed_forward_dropout: float = 0.1  # on the hidden units of the feed-forward sublayer
    input_dropout: float = 0.1  # on the embedding
    output_dropout: float = 0.1  # on the last layer's output
    word_dropout: float = 0.1  # whole word types of the input, embedding vector and all
    # A cut model: original indices of the heads each layer still has, and its s_g (1.0 where dense).
    heads_kept: list[list[int]] | None = None  # None = all H in every layer
    output_scale: list[float] | None = None  # None = 1.0 in every layer
    scale_absorbed: bool = False  # s_g is already inside WO (an inference export)

    @property
    def head_width(self) -> int:
        """c = d / H."""
        return self.width // self.heads

    @property
    def family(self) -> str:
        """What the layers are called in the papers."""
        if self.feed_forward:
            return "All-attention with feed-forward" if self.persistent_vectors else "Transformer-XL"
        return "All-attention" if self.persistent_vectors else ATTENTION_ALONE

    @property
    def eos_ends_lines(self) -> bool:
        """As all texts of ours."""
        return True

    @property
    def band_ends(self) -> list[int]:
        """Upper ends of the vocabulary's frequency bands; the last one is V."""
        assert self.vocabulary_size is not None
        return [*self.cutoffs, self.vocabulary_size]

    def cache_bytes_per_token(self, element: int) -> None:
        """The memory holds inputs of the layers, of as many positions at any length of the text."""

    @property
    def parameters_per_head(self) -> int:
        """What removing one head removes: its q, k, v, r, o blocks, u, v, PK and PV (no feed-forward)."""
        c = self.head_width
        return 5 * self.width * c + 2 * c + 2 * self.persistent_vectors * c

    def unit_costs(self, group: bool) -> dict[str, int]:
        """`parameters` of a head, whose keys and values are its own."""
        return {"parameters": self.parameters_per_head}

    def layer_multiply_adds(self, layer: int) -> int:
        """Multiply-adds of one layer per token in evaluation with a full memory, keys and values cached.

        Per head: q, k, v, o projections 4 d c; scores and values over the M + 1 visible positions
        2 (M + 1) c; position scores (M + 1) c; persistent scores and values 2 N c. The feed-forward
        sublayer: 2 d F.
        """
        c, visible = self.head_width, self.memory_length + 1
        per_head = 4 * self.width * c + 3 * visible * c + 2 * self.persistent_vectors * c
        return self.heads_present[layer] * per_head + 2 * self.width * self.feed_forward

    def training_multiply_adds(self, segment_length: int) -> float:
        """Multiply-adds of training per token: forward, and twice as many backward.

        Counted are the layers, with the keys and values of the memory, which every segment projects anew,
        and of the softmax what every token takes: head projection, first band and clusters. Not counted are
        what the recomputing core computes a second time (MFU's convention), embedding and tails, whose share
        depends on the text, position keys, which are the same for all streams, norms, dropout and the
        optimizer.

        Args:
            segment_length: T; a segment of T tokens has M + T keys, a full memory among them.
        """
        width, c, length = self.width, self.head_width, self.memory_length
        keys = (length + segment_length) / segment_length  # for each query
        visible = length + (1 if self.same_length else (1 + segment_length) / 2)  # by a query, on average
        per_head = 2 * width * c * (1 + keys) + 3 * visible * c + 2 * self.persistent_vectors * c
        layers = self.heads_kept_total * per_head + 2 * self.layers * width * self.feed_forward
        first, tails = self.band_ends[0], len(self.band_ends) - 1
        softmax = width * (first + tails + (width if tails else 0))
        return 3 * (layers + softmax)

    @property
    def context(self) -> int | None:
        """Positions are relative: `position_rows` is the limit."""
        return None

    @property
    def heads_per_group(self) -> int:
        """Every head has its own keys and values."""
        return 1

    def dense(self) -> "ModelConfig":
        """The same with all heads, before any removal."""
        return replace(self, heads_kept=None, output_scale=None, scale_absorbed=False)

    def with_heads(self, kept: list[list[int]], scales: list[float]) -> "ModelConfig":
        """The same with these heads and s_g."""
        return replace(copy.deepcopy(self), heads_kept=kept, output_scale=scales)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for a weights-only checkpoint or JSON."""
        return asdict(self)


def model_config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `ModelConfig.to_dict`.

    Raises:
        InputError: a key is unknown, a value is of the wrong kind, or it contradicts another.
    """
    unknown = sorted(map(str, set(values) - set(ModelConfig.__dataclass_fields__)))
    if unknown:
        raise InputError(f"the model's configuration has unknown entries: {', '.join(unknown)}")
    config = ModelConfig(**values)
    refuse_wrong_kinds("model", config)
    check_model(config)
    return config


def refuse_another_model(saved: ModelConfig, wanted: ModelConfig, path: Path) -> None:
    """Refuse to go on from a checkpoint whose model is not the one that the settings say.

    Raises:
        InputError: names both families and every size that differs.
    """
    old, new = saved.to_dict(), wanted.to_dict()
    differing = [f"model.{name}: {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]
    if differing:
        raise InputError(
            f"{path}: holds another model ({saved.family}) than the settings say ({wanted.family}): "
            f"{'; '.join(differing)}; give this run another name="
        )


def check_model(config: ModelConfig) -> None:
    """Refuse sizes that contradict each other.

    Raises:
        InputError: names both settings and what to change.
    """
    at_least_one = ("layers", "width", "heads", "memory_length", "position_rows", "div")
    for name in at_least_one:
        if getattr(config, name) < 1:
            raise InputError(f"model.{name}={getattr(config, name)}: must be at least 1")
    if config.vocabulary_size is not None and config.vocabulary_size < 1:
        raise InputError(f"model.vocabulary_size={config.vocabulary_size}: must be at least 1")
    for name in ("persistent_vectors", "feed_forward"):
        if getattr(config, name) < 0:
            raise InputError(f"model.{name}={getattr(config, name)}: must not be negative; 0 = none")
    if config.width % config.heads:
        raise InputError(
            f"model.width={config.width} is not divisible by model.heads={config.heads}: "
            "every head needs the same whole number of dimensions"
        )
    for name in ("attention", "projection", "feed_forward", "input", "output", "word"):
        value = getattr(config, f"{name}_dropout")
        if not 0 <= value < 1:
            raise InputError(f"model.{name}_dropout={value}: a dropout lies in [0, 1)")
    if config.same_length and config.memory_length >= config.position_rows:
        raise InputError(
            f"model.memory_length={config.memory_length} needs distances 0..{config.memory_length}, but "
            f"model.position_rows={config.position_rows}: raise position_rows to at least "
            f"{config.memory_length + 1}"
        )
    _check_cutoffs(config)
    _check_heads(config)


def _check_cutoffs(config: ModelConfig) -> None:
    cutoffs = list(config.cutoffs)
    if any(b <= a for a, b in zip([0, *cutoffs], cutoffs, strict=False)):
        raise InputError(f"model.cutoffs={cutoffs}: must be positive and increasing")
    if cutoffs and config.vocabulary_size is not None and cutoffs[-1] >= config.vocabulary_size:
        raise InputError(
            f"model.cutoffs={cutoffs}: the last one must be below the vocabulary's size "
            f"{config.vocabulary_size}; give smaller ones, or model.cutoffs=[] for a plain softmax"
        )
    narrowest = config.width // config.div ** len(cutoffs)
    if narrowest < 1:
        raise InputError(
            f"model.width={config.width} divided by model.div={config.div} for each of {len(cutoffs)} "
            "model.cutoffs leaves no dimension for the last band: use fewer cutoffs or a smaller div"
        )


def _check_heads(config: ModelConfig) -> None:
    for name in ("heads_kept", "output_scale"):
        entries = getattr(config, name)
        if entries is not None and len(entries) != config.layers:
            raise InputError(
                f"model.{name} has {len(entries)} entries but model.layers={config.layers}: one per layer"
            )
    if config.scale_absorbed and config.output_scale is not None:
        raise InputError("model.output_scale is set although model.scale_absorbed says it is inside WO")
    for layer, scale in enumerate(config.output_scale or []):
        if not 0 < scale < math.inf:
            raise InputError(f"model.output_scale of layer {layer} is {scale}: must be positive and finite")
    for layer, kept in enumerate(config.heads_kept or []):
        if list(kept) != sorted(set(kept)) or any(not 0 <= head < config.heads for head in kept):
            raise InputError(
                f"model.heads_kept of layer {layer} is {list(kept)}: give increasing original head indices "
                f"in 0..{config.heads - 1} (model.heads={config.heads})"
            )
