"""Exports: a model for others, as a folder that loads without running code.

    model.safetensors   the weights, s_g inside WO
    config.json         format version, model sizes with the heads kept per layer (original indices), hash of
                        the tokenizer, and pi of the heads that there were, where gates decided
    tokenizer.json      the vocabulary

The names are fixed; config.json names no file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from allattn.errors import InputError
from allattn.files import new_folder
from allattn.model.config import model_config_from_dict
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import absorb_scale
from allattn.training.loading import TOKENIZER_FILE, checked_tokenizer
from allattn.training.weights import model_from_weights

EXPORT_VERSION = 1
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def write_export(
    model: AllAttentionLM, meta: dict[str, Any], tokenizer: Path, folder: Path
) -> AllAttentionLM:
    """Write an export; the folder appears under its name when it is whole.

    Args:
        model: dense or cut, s_g explicit.
        meta: what a checkpoint says about it: `tokenizer_hash`, and perhaps `pi` and `heads_before`.
        tokenizer: the tokenizer.json, checked.
        folder: must not exist.

    Returns:
        The exported model, s_g inside WO.

    Raises:
        InputError: the folder exists or cannot be written; nothing is left of it then.
    """
    _refuse_existing(folder)
    exported = absorb_scale(model).eval()
    config = {
        "format_version": EXPORT_VERSION,
        "model": exported.config.to_dict(),
        "tokenizer_hash": meta["tokenizer_hash"],
    }
    config |= {name: meta[name] for name in ("pi", "heads_before") if name in meta}
    weights = {name: tensor.cpu().contiguous() for name, tensor in exported.state_dict().items()}
    try:
        with new_folder(folder) as partial:
            (partial / WEIGHTS_FILE).write_bytes(save(weights, {"format": "pt"}))
            (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            shutil.copyfile(tokenizer, partial / TOKENIZER_FILE)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: the export cannot be written ({reason})") from None
    return exported


def load_export(folder: Path) -> AllAttentionLM:
    """The model of an export, in evaluation mode; all weights must fit.

    Raises:
        InputError: a file is missing, damaged, of a newer format, or does not belong to the others.
    """
    config = export_record(folder)
    checked_tokenizer(folder / WEIGHTS_FILE, {"allattn": config})
    weights, path = _read_weights(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE
    try:
        sizes = model_config_from_dict(config["model"])
        if sizes.vocabulary_size is None:
            raise InputError("model.vocabulary_size is not set")
    except InputError as error:
        raise InputError(f"{folder / CONFIG_FILE}: {error}") from None
    return model_from_weights(sizes, weights, path, CONFIG_FILE).to(weights["positions.table"].dtype).eval()


def _refuse_existing(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder}: exists already; give the export another folder")


def export_record(folder: Path) -> dict[str, Any]:
    """What an export's config.json says; its entries are those of a checkpoint.

    Raises:
        InputError: as `load_export`, but for the weights.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE):
        if not (folder / name).is_file():
            raise InputError(f"{folder}: is not an export of allattn (it has no {name})")
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{path}: is damaged (it is not JSON)") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise InputError(f"{path}: is not the configuration of an export of allattn (it has no model)")
    version = config.get("format_version")
    if version != EXPORT_VERSION:
        raise InputError(
            f"{path}: has export format_version {version}, this version of allattn reads {EXPORT_VERSION}; "
            "use the version that wrote it"
        )
    if not isinstance(config.get("tokenizer_hash"), str):
        raise InputError(f"{path}: has no tokenizer_hash")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        weights = load_file(path)
    except (OSError, SafetensorError):
        raise InputError(f"{path}: is damaged (it is not a whole safetensors file)") from None
    kinds = {tensor.dtype for tensor in weights.values()}
    if len(kinds) != 1 or not all(kind.is_floating_point for kind in kinds):
        raise InputError(f"{path}: its tensors are not all of one floating-point type")
    return weights
