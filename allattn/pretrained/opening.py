"""A pretrained causal language model from a folder of transformers' files, or one GGUF file in a folder."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from allattn.errors import InputError, first_line
from allattn.files import file_hash
from allattn.pretrained.language_model import NETWORK, PretrainedLM, sizes_only
from allattn.pretrained.libraries import transformers
from allattn.pretrained.sizes import PretrainedSizes

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


@dataclass(frozen=True)
class Pretrained:
    """A model as it lies in a folder."""

    sizes: PretrainedSizes
    state: dict[str, Tensor]  # float32 on the CPU, by names in `PretrainedLM`
    tokenizer: Tokenizer
    hash: str  # of the weights' files


def open_pretrained(folder: Path) -> Pretrained:
    """Read a model of transformers, its weights in float32.

    Raises:
        InputError: it is not there, no causal language model, not an architecture whose heads are known, or
            larger than the memory that is free.
    """
    transformers()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise InputError(f"{folder}: holds no weights of a model ({', '.join(_WEIGHTS)})")
    source = {"gguf_file": files[0].name} if files[0].suffix == ".gguf" else {}
    try:
        config = AutoConfig.from_pretrained(folder, **source)
        sizes = sizes_of(config)
        skeleton = sizes_only(sizes)
        _refuse_too_large(skeleton, folder)
        with _without_bar():
            network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    except Exception as error:  # whatever transformers meets in files of strangers
        raise InputError(f"{folder}: transformers cannot read it ({first_line(error)})") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(f"{folder}: its tokenizer is not one of the tokenizers library (tokenizer.json)")
    state = {NETWORK + name: tensor for name, tensor in network.state_dict().items()}
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    if own.get_vocab_size() > sizes.vocabulary_size:
        raise InputError(
            f"{folder}: its tokenizer has {own.get_vocab_size()} tokens, its model {sizes.vocabulary_size}"
        )
    return Pretrained(sizes, state, own, sha256("".join(map(file_hash, files)).encode()).hexdigest())


@contextmanager
def _without_bar() -> Iterator[None]:
    """transformers shows no bar of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def sizes_of(config: Any) -> PretrainedSizes:
    """Sizes of the dense model of a configuration of transformers.

    Raises:
        InputError: it is not that of a causal language model with the same heads in every layer.
    """
    values = json.loads(config.to_json_string(use_diff=False))
    text = config.get_text_config()
    if text is not config:
        raise InputError(f"a {config.model_type} reads more than text: its heads cannot be gated")
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise InputError(f"a {config.model_type} names no number of attention heads")
    groups = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = PretrainedSizes(
        network=values,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=heads,
        groups=groups,
        head_width=width,
        vocabulary_size=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
    )
    return sizes


def _refuse_too_large(skeleton: PretrainedLM, folder: Path) -> None:
    needed = 4 * sum(p.numel() for p in skeleton.parameters())
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(
            f"its weights take {needed / 2**30:.1f} GiB in float32, but {free / 2**30:.1f} GiB of memory are "
            "free"
        )


def free_memory() -> int | None:
    """Bytes that this machine can still give; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return 1024 * values["MemAvailable"]
    except (OSError, LookupError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
