"""The weights of an export: one safetensors file, or several with a list of where each tensor is."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from allattn.errors import InputError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
LARGEST_SHARD = 5 * 10**9  # bytes
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_KINDS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def write_weights(folder: Path, weights: dict[str, Tensor], largest: int = LARGEST_SHARD) -> None:
    """Write the weights into a folder, with at most `largest` bytes, or one tensor, in a file.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    shards: list[dict[str, Tensor]] = [{}]
    room = largest
    for name, tensor in weights.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = largest
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        (folder / WEIGHTS_FILE).write_bytes(save(weights, {"format": "pt"}))
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / file).write_bytes(save(shard, {"format": "pt"}))
        places |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weights_path(folder: Path) -> Path:
    """The weights' file, or the list of their files where they are several."""
    index = folder / INDEX_FILE
    return index if index.is_file() and not (folder / WEIGHTS_FILE).is_file() else folder / WEIGHTS_FILE


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors by name.

    Args:
        path: from `weights_path`.

    Raises:
        InputError: as `read_headers`.
    """
    weights: dict[str, Tensor] = {}
    for file in _files(path):
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError):
            raise InputError(f"{file}: is damaged (it is not a whole safetensors file)") from None
    return weights


def _files(path: Path) -> list[Path]:
    """The files of the weights; a list of files may name no others than those of a model beside itself."""
    if path.name == WEIGHTS_FILE:
        return [path]
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        index = None
    places = index.get("weight_map") if isinstance(index, dict) else None
    names = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    if not names or not all(map(_SHARD.fullmatch, names)):
        raise InputError(f"{path}: is damaged (it is no list of weights in files model-*-of-*.safetensors)")
    return [path.with_name(name) for name in names]


def read_headers(path: Path) -> dict[str, Any]:
    """The tensors by name on the device meta; no number is read.

    Args:
        path: from `weights_path`.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not all of one floating-point type.
    """
    found: dict[str, Tensor] = {}
    kinds = set()
    for file_path in _files(path):
        try:
            with safe_open(file_path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    header = file.get_slice(name)
                    kinds.add(kind := header.get_dtype())
                    shape = header.get_shape()
                    found[name] = torch.empty(shape, dtype=_KINDS.get(kind, torch.int64), device="meta")
        except (OSError, SafetensorError):
            raise InputError(f"{file_path}: is damaged (it is not a whole safetensors file)") from None
    if len(kinds) != 1 or not kinds <= _KINDS.keys():
        raise InputError(f"{path}: its tensors are not all of one floating-point type")
    return found
