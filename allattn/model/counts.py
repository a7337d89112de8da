"""Parameters by part, layer and head; multiply-adds per token from the shapes."""

from dataclasses import dataclass

from allattn.model.attention import AllAttention
from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; the embedding side is everything outside the layers."""

    layers: int
    embedding_side: int

    @property
    def total(self) -> int:
        """Layers and embedding side together (tied parameters once)."""
        return self.layers + self.embedding_side


def count_parameters(model: AllAttentionLM) -> ParameterCounts:
    """Count what the model really holds; no mask or gate is counted."""
    layers = sum(p.numel() for p in model.layers.parameters())
    return ParameterCounts(layers, sum(p.numel() for p in model.parameters()) - layers)


def parameters_per_head(config: ModelConfig) -> int:
    """What removing one head removes: its q, k, v, r, o blocks, u, v, PK and PV (no feed-forward)."""
    width, c = config.width, config.head_width
    return 5 * width * c + 2 * c + 2 * config.persistent_vectors * c


def head_parameters(layer: AllAttention) -> int:
    """Parameters of `layer` that belong to its heads."""
    return sum(layer.get_parameter(name).numel() for name in layer.HEAD_AXIS)


def layer_multiply_adds(config: ModelConfig, layer: int) -> int:
    """Multiply-adds of one layer per token in evaluation with a full memory, keys and values cached.

    Per head: q, k, v, o projections 4 d c; scores and values over the M + 1 visible positions 2 (M + 1) c;
    position scores (M + 1) c; persistent scores and values 2 N c. The feed-forward sublayer: 2 d F.
    """
    c, visible = config.head_width, config.memory_length + 1
    per_head = 4 * config.width * c + 3 * visible * c + 2 * config.persistent_vectors * c
    return config.heads_present[layer] * per_head + 2 * config.width * config.feed_forward


def multiply_adds(config: ModelConfig) -> int:
    """Multiply-adds of all layers per token (see `layer_multiply_adds`); the softmax is not included."""
    return sum(layer_multiply_adds(config, layer) for layer in range(config.layers))


def training_multiply_adds(config: ModelConfig, segment_length: int) -> float:
    """Multiply-adds of training per token: forward, and twice as many backward.

    Counted are the layers, with the keys and values of the memory, which every segment projects anew, and of
    the softmax what every token takes: head projection, first band and clusters. Not counted are what the
    recomputing core computes a second time (MFU's convention), embedding and tails, whose share depends on
    the text, position keys, which are the same for all streams, norms, dropout and the optimizer.

    Args:
        config: of the model, with a full memory.
        segment_length: T; a segment of T tokens has M + T keys.
    """
    width, c, length = config.width, config.head_width, config.memory_length
    keys = (length + segment_length) / segment_length  # for each query
    visible = length + (1 if config.same_length else (1 + segment_length) / 2)  # by a query, on average
    per_head = 2 * width * c * (1 + keys) + 3 * visible * c + 2 * config.persistent_vectors * c
    layers = config.heads_kept_total * per_head + 2 * config.layers * width * config.feed_forward
    first, tails = config.band_ends[0], len(config.band_ends) - 1
    softmax = width * (first + tails + (width if tails else 0))
    return 3 * (layers + softmax)
