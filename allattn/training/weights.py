"""From named tensors that one does not trust to a model: sizes, types and numbers are checked first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.errors import InputError, first_line
from allattn.families import filled, sizes_from_dict, sizes_only
from allattn.model.gated import GatedLM, Sizes


def recorded_sizes(values: dict[str, Any], path: Path | str) -> Sizes:
    """The sizes that a file records of its model; `path` is where they come from, for messages.

    Raises:
        InputError: they are not those of a model, or lack the vocabulary's size.
    """
    try:
        sizes = sizes_from_dict(values)
        if sizes.vocabulary_size is None:
            raise InputError("model.vocabulary_size is not set")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return sizes


def model_from_weights(
    config: Sizes, weights: dict[str, Any], path: Path, recorded: str = "the recorded sizes"
) -> GatedLM:
    """A model of these sizes with these weights, all of them, in float64 if one of them is, else in float32.

    Arguments and errors are those of `check_weights`.
    """
    check_weights(config, weights, path, recorded)
    double = any(tensor.dtype == torch.float64 for tensor in weights.values())
    return filled(config, weights, torch.float64 if double else torch.float32, torch.device("cpu"))


def check_weights(
    config: Sizes, weights: dict[str, Any], path: Path, recorded: str = "the recorded sizes"
) -> GatedLM:
    """`check_shapes`, and every number is finite.

    Raises:
        InputError: as `check_shapes`, or a tensor holds NaN or infinity.
    """
    model = check_shapes(config, weights, path, recorded)
    refuse_non_finite_weights(weights, path)
    return model


def refuse_non_finite_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse NaN and infinity.

    Raises:
        InputError: names the tensor.
    """
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{path}: {name} holds NaN or infinity: use an earlier checkpoint")


def check_shapes(
    config: Sizes, weights: dict[str, Any], path: Path, recorded: str = "the recorded sizes"
) -> GatedLM:
    """Refuse weights that are not those of a model of these sizes; that model, on the device meta.

    Args:
        config: sizes, checked.
        weights: by parameter name; their numbers are not read.
        path: where they come from, for messages.
        recorded: what the message calls the sizes.

    Raises:
        InputError: a tensor is missing, superfluous, or of another shape or type.
    """
    wrong = f"{path}: the weights do not fit {recorded}: "
    last = f".{config.layers - 1}."
    if not any(last in name for name in weights):  # before as many layers are built as the file claims
        raise InputError(f"{wrong}layer {config.layers - 1} is absent")
    try:
        model = sizes_only(config)
    except RuntimeError as error:
        raise InputError(f"{wrong}{first_line(error)}") from None  # more elements than can be counted
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        found, should = _described(weights.get(name)), _described(wanted.get(name))
        if found != should:
            raise InputError(f"{wrong}{name} is {found}, but should be {should}")
    return model


def _described(tensor: Any) -> str:
    if tensor is None:
        return "absent"
    plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.is_floating_point()
    return str(list(tensor.shape)) if plain else "no plain tensor of floating-point numbers"
