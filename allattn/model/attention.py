"""One layer: LayerNorm, attention over sequence and persistent vectors, residual sum; perhaps feed-forward.

h_i = Softmax(Q_i [K_i, PK_i]^T / sqrt(c)) [V_i, PV_i]
O   = s_g * sum_i g_i h_i WO_i
x   = x + Dropout(O + bias)
x   = x + Dropout(FeedForward(x))     where there is a feed-forward sublayer

Persistent vectors without feed-forward are All-attention, feed-forward without persistent vectors is
Transformer-XL (Dai et al.). Heads, gates and memory are the same in both.

B batch rows, T queries, S = memory + T keys, d width, h heads present (0..H), c = d / H, N persistent
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from allattn.model.config import ModelConfig
from allattn.model.cores.choose import attend
from allattn.model.cores.inputs import Core, CoreInputs
from allattn.model.feed_forward import FeedForward
from allattn.model.initial import UnfilledLinear, normal_


class AllAttention(nn.Module):
    """A layer with any number of heads from 0 to H; the cut model is this class with smaller tensors.

    The feed-forward sublayer belongs to no head and stays when all of them are gone.
    """

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
        self.query = UnfilledLinear(config.width, present, bias=False)
        self.key = UnfilledLinear(config.width, present, bias=False)
        self.value = UnfilledLinear(config.width, present, bias=False)
        self.position = UnfilledLinear(config.width, present, bias=False)
        self.output = UnfilledLinear(present, config.width, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.width))
        self.content_bias = nn.Parameter(torch.zeros(present))  # u
        self.position_bias = nn.Parameter(torch.zeros(present))  # v
        self.persistent_keys = nn.Parameter(torch.empty(config.persistent_vectors, present))
        self.persistent_values = nn.Parameter(torch.empty(config.persistent_vectors, present))
        self.head_outputs, self.head_sum = nn.Identity(), nn.Identity()  # Z and Y pass, for who watches
        self.dropout = nn.Dropout(config.projection_dropout)
        self.feed_forward = FeedForward(config) if config.feed_forward else None
        for name, parameter in self.named_parameters():
            if not parameter.numel() or (not self.heads_kept and name in self.NEEDS_HEADS):
                parameter.requires_grad_(False)
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
            return self.after_heads(x, None)
        queries = x.shape[1]
        normed = self.norm(torch.cat([memory.to(x.dtype), x], dim=1))  # (B, S, d)
        by_head = (-1, self.head_width)
        inputs = CoreInputs(
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
        )
        return self.after_heads(x, self.core(inputs), multipliers)

    def after_heads(self, x: Tensor, z: Tensor | None, multipliers: Tensor | None = None) -> Tensor:
        """The rest of the layer: sum of the heads, residual sum, feed-forward.

        Args:
            x: (..., d) the layer's input.
            z: (..., h, c) the heads' outputs; None where the layer has no heads.
            multipliers: as in `forward`.

        Returns:
            (..., d).
        """
        if z is None:
            out = torch.zeros_like(x) + self.bias
        else:
            z = self.head_outputs(z)
            z = z * (self.scale if multipliers is None else multipliers.unsqueeze(-1))
            out = self.head_sum(self.output(z.flatten(-2)) + self.bias)
        x = x + self.dropout(out)
        return x if self.feed_forward is None else x + self.dropout(self.feed_forward(x))
