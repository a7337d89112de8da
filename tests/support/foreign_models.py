"""Tiny causal language models of transformers with random weights, one of each kind."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from allattn.heads.watched import Batch

WORDS = 40
_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 3, "head_dim": 4, "intermediate_size": 16}
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "attention_bias": True},
    "mistral": {**_GROUPED, "sliding_window": 5},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "olmo2": _GROUPED,
    "gemma3_text": {**_GROUPED, **_SLIDING, "query_pre_attn_scalar": 6},
    "gpt2": {**_SIZES, "n_inner": 16},
    "gpt_neox": {**_SIZES, "intermediate_size": 16},
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """A model in evaluation mode; every parameter is random, biases too."""
    torch.manual_seed(7)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(kind, vocab_size=WORDS, **tokens, **{**KINDS[kind], **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def row(tokens: int, seed: int = 3) -> Tensor:
    """(tokens,) random ids, none of them padding."""
    return torch.randint(2, WORDS, (tokens,), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], left: bool) -> Batch:
    """Rows of several lengths; each token but the first of its row is a target."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    targets, real = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool)
    for number, tokens in enumerate(rows):
        first = longest - len(tokens) if left else 0
        here = slice(first, first + len(tokens))
        ids[number, here], real[number, here] = tokens, True
        targets[number, first : first + len(tokens) - 1] = tokens[1:]
    return Batch(ids, targets, real)
