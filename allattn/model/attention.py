"""One All-attention layer: LayerNorm, attention over sequence and persistent vectors, residual sum.

h_i = Softmax(Q_i [K_i, PK_i]^T / sqrt(c)) [V_i, PV_i]
O   = s_g * sum_i g_i h_i WO_i
x   = x + Dropout(O + bias)

B batch rows, T queries, S = memory + T keys, d width, h heads present (0..H), c = d / H, N persistent
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from allattn.model.config import ModelConfig
from allattn.model.cores.core import Core, attend
from allattn.model.initial import normal_


class AllAttention(nn.Module):
    """A layer with any number of heads from 0 to H; the cut model is this class with smaller tensors."""

    # Parameters that belong to the heads, and the axis along which the heads' blocks of c lie.
    HEAD_AXIS: ClassVar[dict[str, int]] = {
        "query.weight": 0,
        "key.weight": 0,
        "value.weight": 0,
        "position.weight": 0,
        "output.weight": 1,
        "content_bias": 0,
        "position_bias": 0,
        "persistent_keys": 1,
        "persistent_values": 1,
    }
    # Parameters without effect, and not trained, where the layer has no heads.
    NEEDS_HEADS: ClassVar[tuple[str, ...]] = (*HEAD_AXIS, "norm.weight", "norm.bias")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads_kept = config.kept(layer)
        self.head_width = config.head_width
        self.scale = config.scale(layer)  # the constant s_g of a cut layer
        self.attention_dropout = config.attention_dropout
        self.core: Core = attend
        present = len(self.heads_kept) * self.head_width  # h * c
        self.norm = nn.LayerNorm(config.width)
        self.query = _EmptyLinear(config.width, present)
        self.key = _EmptyLinear(config.width, present)
        self.value = _EmptyLinear(config.width, present)
        self.position = _EmptyLinear(config.width, present)
        self.output = _EmptyLinear(present, config.width)
        self.bias = nn.Parameter(torch.zeros(config.width))
        self.content_bias = nn.Parameter(torch.zeros(present))  # u
        self.position_bias = nn.Parameter(torch.zeros(present))  # v
        self.persistent_keys = nn.Parameter(torch.empty(config.persistent_vectors, present))
        self.persistent_values = nn.Parameter(torch.empty(config.persistent_vectors, present))
        self.dropout = nn.Dropout(config.projection_dropout)
        if not self.heads_kept:
            for name in self.NEEDS_HEADS:
                self.get_parameter(name).requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Persistent keys N(0, 1/c), values N(0, 1/N) (Sukhbaatar et al.); projections N(0, 1/d)."""
        if not self.heads_kept:
            return
        std = self.norm.normalized_shape[0] ** -0.5
        for linear in (self.query, self.key, self.value, self.position, self.output):
            normal_(linear.weight, std=std)
        if len(self.persistent_keys):
            normal_(self.persistent_keys, std=self.head_width**-0.5)
            normal_(self.persistent_values, std=len(self.persistent_values) ** -0.5)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        positions: Tensor,
        window: int,
        multipliers: Tensor | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            x: (B, T, d) input.
            memory: (B, M', d) this layer's inputs at the M' positions before `x`, without gradient.
            positions: (S, d) relative-position rows, row i for distance i; S = M' + T.
            window: how many positions before itself a query sees.
            multipliers: (h,) s_g * g_i of every head present; None = the constant `scale`.

        Returns:
            (B, T, d).
        """
        if not self.heads_kept:
            return x + self.dropout(self.bias.to(x.dtype).expand_as(x))
        batch, queries, _ = x.shape
        normed = self.norm(torch.cat([memory.to(x.dtype), x], dim=1))  # (B, S, d)
        by_head = (-1, self.head_width)
        z = self.core(
            self.query(normed[:, -queries:]).unflatten(-1, by_head),
            self.key(normed).unflatten(-1, by_head),
            self.value(normed).unflatten(-1, by_head),
            self.position(positions).unflatten(-1, by_head),
            self.content_bias.unflatten(-1, by_head),
            self.position_bias.unflatten(-1, by_head),
            self.persistent_keys.unflatten(-1, by_head),
            self.persistent_values.unflatten(-1, by_head),
            window,
            self.attention_dropout if self.training else 0.0,
            key_scale=math.sqrt(self.head_width),
            value_scale=math.sqrt(len(self.persistent_values)),
        )  # (B, T, h, c)
        z = z * (self.scale if multipliers is None else multipliers.unsqueeze(-1))
        out = self.output(z.reshape(batch, queries, -1)) + self.bias
        return x + self.dropout(out)


class _EmptyLinear(nn.Linear):
    """A bias-free linear map whose weight is left for the layer to fill (it may have no elements)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass
