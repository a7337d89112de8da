"""Model families: which classes the sizes of a checkpoint belong to. The one place that lists them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allattn.errors import InputError
from allattn.heads.all_attention import OwnModel
from allattn.heads.watched import HeadModel
from allattn.model.config import ModelConfig, model_config_from_dict
from allattn.model.gated import GatedLM, Sizes
from allattn.model.language_model import AllAttentionLM
from allattn.pretrained import language_model as pretrained
from allattn.pretrained.sizes import FAMILY, PretrainedSizes, pretrained_sizes_from_dict
from allattn.pretrained.watched import PretrainedModel


def sizes_from_dict(values: dict[str, Any]) -> Sizes:
    """The inverse of `Sizes.to_dict`; the entry `family` says whose they are, without it they are ours.

    Raises:
        InputError: the entries are not those of a model.
    """
    if values.get("family") == FAMILY:
        return pretrained_sizes_from_dict(values)
    return model_config_from_dict(values)


def sizes_only(sizes: Sizes) -> GatedLM:
    """The model on the device meta: names, shapes and what is trained, no numbers.

    Raises:
        InputError: a library that the family needs is not installed, or does not know the model.
    """
    if isinstance(sizes, PretrainedSizes):
        return pretrained.sizes_only(sizes)
    assert isinstance(sizes, ModelConfig)
    with torch.device("meta"):
        return AllAttentionLM(sizes)


def filled(sizes: Sizes, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> GatedLM:
    """A model of these sizes with these weights, all of them."""
    if isinstance(sizes, PretrainedSizes):
        return pretrained.filled(sizes, state, dtype, device)
    model = sizes_only(sizes).to_empty(device=device).to(dtype)
    model.load_state_dict(state)
    return model


def for_removal(sizes: Sizes, masked: bool) -> Sizes:
    """The sizes of a dense model whose closed heads are to be masked or cut.

    Raises:
        InputError: the architecture does not allow it.
    """
    if isinstance(sizes, PretrainedSizes):
        sizes = replace(sizes, masked=masked)
        if not masked:
            pretrained.refuse_removal(pretrained.sizes_only(sizes))
    elif masked:
        raise InputError("gates.removal=masked is for pretrained models; heads of our own are cut")
    return sizes


def all_attention(model: GatedLM, what: str) -> AllAttentionLM:
    """The model as one of ours.

    Raises:
        InputError: it is of another family; `what` was to be done.
    """
    if not isinstance(model, AllAttentionLM):
        raise InputError(f"{what}: is for models of allattn, this is a {model.config.family}")
    return model


def watched(model: GatedLM) -> HeadModel:
    """The model as one whose heads are watched."""
    if isinstance(model, pretrained.PretrainedLM):
        return PretrainedModel(model)
    return OwnModel(all_attention(model, "watching heads"))
