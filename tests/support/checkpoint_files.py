"""Checkpoints of made-up models, with their vocabulary beside them."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from allattn.data.vocabulary import save_tokenizer, tokenizer_hash, word_tokenizer
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import cut_model, plan_removal
from allattn.training.checkpoints import FORMAT_VERSION, write_checkpoint

TOKENIZER = word_tokenizer(Counter({f"w{i}".encode(): 100 - i for i in range(48)}))  # 50 entries


def cut(model: AllAttentionLM, heads: list[list[int]]) -> AllAttentionLM:
    gates = [torch.tensor([float(head in kept) for head in range(8)]) for kept in heads]
    return cut_model(model, plan_removal(model.config, gates, True))


def saved_checkpoint(
    model: AllAttentionLM, folder: Path, tokenizer: Tokenizer = TOKENIZER, **meta: Any
) -> Path:
    """last.ckpt of this model, with its tokenizer.json beside it."""
    path = folder / "last.ckpt"
    entry = {
        "format_version": FORMAT_VERSION,
        "model": model.config.to_dict(),
        "phase": "fine_tune",
        "step": 7,
        "best": 1.0,
        "memory": [],
        "data": {},
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "fingerprint": "",
        "output_scaling": None,
        "target_sparsity": None,
        **meta,
    }
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for layer, pi in enumerate(meta.get("gates", [])):
        state[f"gates.pi.{layer}"] = pi
    entry.pop("gates", None)
    write_checkpoint(path, {"state_dict": state, "allattn": entry})
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    return path
