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
