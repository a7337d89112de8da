"""Pretrain All-attention Transformer language models and prune whole heads with learned L0 gates."""

__version__ = "0.1.0"
