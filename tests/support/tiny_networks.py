"""Tiny causal language models of transformers with random weights, and folders that hold them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from allattn.pretrained.language_model import NETWORK, PretrainedLM, filled
from allattn.pretrained.opening import sizes_of

SHAPE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 3}
GROUPED = {
    **SHAPE,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
}
JOINED = {**SHAPE, "num_attention_heads": 6}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma3_text": {**GROUPED, "sliding_window": 5},
    "gpt2": JOINED,
    "gpt_neox": {**JOINED, "intermediate_size": 16},
    "olmo2": GROUPED,
}
CUTTABLE = [kind for kind in KINDS if kind != "olmo2"]


def network(kind: str) -> Any:
    """A model in evaluation mode whose parameters are all random, biases and norms too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind], max_position_embeddings=64, pad_token_id=0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


def gated(kind: str, dtype: torch.dtype = torch.float64) -> PretrainedLM:
    """The same with gates."""
    made = network(kind)
    state = {NETWORK + name: tensor for name, tensor in made.state_dict().items()}
    return filled(sizes_of(made.config), state, dtype, torch.device("cpu")).eval()


def saved(kind: str, folder: Path) -> Path:
    """A folder with the model and a tokenizer of single bytes that has no `<eos>` of ours."""
    network(kind).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
