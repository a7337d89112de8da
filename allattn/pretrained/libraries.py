"""transformers and accelerate, imported where a pretrained model is first asked for: they are an extra."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from allattn.errors import InputError


@dataclass(frozen=True)
class Library:
    """What is used of both."""

    config: Callable[[dict[str, Any]], Any]  # a configuration from its plain values
    network: Callable[[Any, str | None], Any]  # a causal language model of a configuration and an attention
    empty: Callable[[], AbstractContextManager[None]]  # inside, parameters are made on the device meta
    register_attention: Callable[[str, Callable[..., Any]], None]


@cache
def transformers() -> Library:
    """The libraries, imported.

    Raises:
        InputError: they are not installed.
    """
    try:
        from accelerate import init_empty_weights
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise InputError(
            f"pretrained models need transformers and accelerate ({error.name} is missing): pip install "
            "'allattn[hf]'"
        ) from None

    def config(values: dict[str, Any]) -> Any:
        return AutoConfig.for_model(**values)

    def network(of: Any, attention: str | None) -> Any:
        return AutoModelForCausalLM.from_config(of, attn_implementation=attention or "sdpa")

    def register_attention(name: str, function: Callable[..., Any]) -> None:
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)

    return Library(config, network, init_empty_weights, register_attention)
