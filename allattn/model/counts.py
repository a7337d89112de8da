"""Parameters by part, layer and head; multiply-adds per token from the shapes."""

from dataclasses import dataclass

from allattn.model.attention import AllAttention
from allattn.model.gated import GatedLM, Sizes


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; the embedding side is everything outside the layers."""

    layers: int
    embedding_side: int

    @property
    def total(self) -> int:
        """Layers and embedding side together (tied parameters once)."""
        return self.layers + self.embedding_side


def count_parameters(model: GatedLM) -> ParameterCounts:
    """Count what the model really holds; no mask or gate is counted."""
    layers = sum(p.numel() for p in model.layers.parameters())
    return ParameterCounts(layers, sum(p.numel() for p in model.parameters()) - layers)


def head_parameters(layer: AllAttention) -> int:
    """Parameters of `layer` that belong to its heads."""
    return sum(layer.get_parameter(name).numel() for name in layer.HEAD_AXIS)


def multiply_adds(config: Sizes) -> int:
    """Multiply-adds of all layers per token (see `layer_multiply_adds`); the softmax is not included."""
    return sum(config.layer_multiply_adds(layer) for layer in range(config.layers))
