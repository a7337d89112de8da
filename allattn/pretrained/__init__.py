"""Pretrained causal language models of transformers, with gates on their heads."""
