"""The feed-forward sublayer of a Transformer-XL layer (Vaswani et al.; Dai et al.), pre-norm.

    W2 Dropout(ReLU(W1 LN(x) + b1)) + b2

d width, F hidden units
"""

import torch
from torch import Tensor, nn

from allattn.model.config import ModelConfig
from allattn.model.initial import UnfilledLinear, normal_


class FeedForward(nn.Module):
    """What the sublayer adds to its input, before the layer's dropout and residual sum.

    None of its parameters belongs to a head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.inner = UnfilledLinear(config.width, config.feed_forward, bias=True)  # W1, b1
        self.dropout = nn.Dropout(config.feed_forward_dropout)
        self.outer = UnfilledLinear(config.feed_forward, config.width, bias=True)  # W2, b2
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W1 ~ N(0, 1/d), W2 ~ N(0, 1/F) (LeCun et al., Efficient BackProp), biases 0."""
        for linear in (self.inner, self.outer):
            normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        hidden = torch.relu(self.inner(self.norm(x)))  # (..., F)
        added: Tensor = self.outer(self.dropout(hidden))
        return added
