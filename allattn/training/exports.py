"""Exports: a model for others, as a folder in the layout of Hugging Face that loads without running code.

    config.json               model_type, format version, model sizes with the heads kept per layer (original
                              indices), hash of the tokenizer, and pi of the heads that there were, where
                              gates decided
    model.safetensors         the weights, s_g inside WO; above 5 GB in files model-*-of-*.safetensors, and
                              model.safetensors.index.json says where each tensor is
    tokenizer.json            the vocabulary
    tokenizer_config.json, special_tokens_map.json, generation_config.json     what transformers reads
    README.md                 the model card

Writing and `load_export` need no transformers. config.json names no file. Format 1 had config.json,
model.safetensors and tokenizer.json alone, and is still read.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tokenizers import Tokenizer

from allattn.data.vocabulary import EOS, load_tokenizer, unknown_id
from allattn.errors import InputError
from allattn.families import all_attention
from allattn.files import new_folder
from allattn.model.config import ModelConfig
from allattn.model.language_model import AllAttentionLM
from allattn.pruning.surgery import absorb_scale
from allattn.training.loading import TOKENIZER_FILE, checked_tokenizer, load_model
from allattn.training.model_card import CardLabels, model_card, record_in
from allattn.training.weight_files import (
    LARGEST_SHARD,
    read_headers,
    read_weights,
    weights_path,
    write_weights,
)
from allattn.training.weights import check_shapes, model_from_weights, recorded_sizes

EXPORT_VERSION = 2
MODEL_TYPE, ARCHITECTURE = "allattn", "AllAttentionForCausalLM"
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
NEW_TOKENS = 100  # that `generate` of transformers writes where it is not told how many
# of names in the weights since format 2: the model inside the class for transformers
_PREFIX = "model."


@dataclass(frozen=True)
class Export:
    """What lies in a folder: read and checked but for the numbers."""

    config: dict[str, Any]
    sizes: ModelConfig
    weights: Path  # their file, or the list of their files
    prefix: str  # of their names


def save_export(checkpoint: Path, folder: Path, result: dict[str, Any]) -> AllAttentionLM:
    """Export a checkpoint of a run with this result, its tokenizer.json beside it.

    Raises:
        InputError: the checkpoint or its tokenizer cannot be used, or `write_export` refuses the folder.
    """
    loaded = load_model(checkpoint)
    tokenizer = checked_tokenizer(checkpoint, {"allattn": loaded.meta})
    record = record_in(result, loaded.model, loaded.meta)
    model = all_attention(loaded.model, f"{checkpoint}: an export")
    return write_export(model, loaded.meta, tokenizer, folder, record=record)


def write_export(
    model: AllAttentionLM,
    meta: dict[str, Any],
    tokenizer: Path,
    folder: Path,
    labels: CardLabels | None = None,
    record: dict[str, Any] | None = None,
    shard: int = LARGEST_SHARD,
) -> AllAttentionLM:
    """Write an export; the folder appears under its name when it is whole.

    Args:
        model: dense or cut.
        meta: what a checkpoint says about it: `tokenizer_hash`, and perhaps `data`, `pi`, `heads_before`.
        tokenizer: the tokenizer.json, checked.
        folder: must not exist.
        labels: for the model card.
        record: the model's in result.json, for the model card.
        shard: most bytes of weights in a file.

    Returns:
        The exported model, s_g inside WO.

    Raises:
        InputError: the folder exists or cannot be written; nothing is left of it then.
    """
    _refuse_existing(folder)
    exported = absorb_scale(model).eval()
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "dtype": str(exported.dtype).removeprefix("torch."),
        "format_version": EXPORT_VERSION,
        "model": exported.config.to_dict(),
        "tokenizer_hash": meta["tokenizer_hash"],
    }
    config |= {name: meta[name] for name in ("pi", "heads_before") if name in meta}
    files: dict[str, Any] = {CONFIG_FILE: config, **_about_tokens(load_tokenizer(tokenizer))}
    card = model_card(folder.name, exported, meta.get("data", {}), record, labels or CardLabels())
    weights = {f"{_PREFIX}{name}": t.cpu().contiguous() for name, t in exported.state_dict().items()}
    try:
        with new_folder(folder) as partial:
            write_weights(partial, weights, shard)
            for name, values in files.items():
                (partial / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            (partial / CARD_FILE).write_text(card, encoding="utf-8")
            shutil.copyfile(tokenizer, partial / TOKENIZER_FILE)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: the export cannot be written ({reason})") from None
    return exported


def load_export(folder: Path) -> AllAttentionLM:
    """The model of an export, in evaluation mode; all weights must fit.

    Raises:
        InputError: as `read_export`, or the weights hold NaN or infinity.
    """
    export = read_export(folder)
    weights = _named_as_in_the_model(read_weights(export.weights), export.prefix)
    kind = next(iter(weights.values())).dtype
    model = model_from_weights(export.sizes, weights, export.weights, CONFIG_FILE).to(kind).eval()
    return all_attention(model, str(folder))


def read_export(folder: Path, needs_tokenizer: bool = True) -> Export:
    """Check all of an export but the weights' numbers, of which none is read.

    Args:
        folder: of this or an earlier format.
        needs_tokenizer: refuse a folder without tokenizer.json.

    Raises:
        InputError: a file is missing, damaged, of a newer format, or does not belong to the others.
    """
    config, weights = export_record(folder, needs_tokenizer), weights_path(folder)
    sizes = check_export_config(config, folder / CONFIG_FILE)
    if (folder / TOKENIZER_FILE).is_file():
        checked_tokenizer(weights, {"allattn": config})
    prefix = _PREFIX if config["format_version"] > 1 else ""
    check_shapes(sizes, _named_as_in_the_model(read_headers(weights), prefix), weights, CONFIG_FILE)
    return Export(config, sizes, weights, prefix)


def export_record(folder: Path, needs_tokenizer: bool = True) -> dict[str, Any]:
    """What an export's config.json says; its entries are those of a checkpoint.

    Raises:
        InputError: as `read_export`, but for the weights.
    """
    for path in (folder / CONFIG_FILE, weights_path(folder), folder / TOKENIZER_FILE):
        if not path.is_file() and (needs_tokenizer or path.name != TOKENIZER_FILE):
            raise InputError(f"{folder}: is not an export of allattn (it has no {path.name})")
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{path}: is damaged (it is not JSON)") from None
    check_export_config(config, path)
    return config


def check_export_config(config: Any, path: Path | str) -> ModelConfig:
    """The sizes in what a config.json holds.

    Raises:
        InputError: they are not those of a model, the format is newer, or an entry names code.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise InputError(f"{path}: is not the configuration of an export of allattn (it has no model)")
    version = config.get("format_version")
    if version not in (1, EXPORT_VERSION):
        raise InputError(
            f"{path}: has export format_version {version!r}, this version of allattn reads 1 and "
            f"{EXPORT_VERSION}; use the version that wrote it"
        )
    if not isinstance(config.get("tokenizer_hash"), str):
        raise InputError(f"{path}: has no tokenizer_hash")
    if "auto_map" in config:
        raise InputError(f"{path}: names code to run (auto_map), which no export of allattn does: remove it")
    sizes = recorded_sizes(config["model"], path)
    if not isinstance(sizes, ModelConfig):
        raise InputError(f"{path}: holds the sizes of a {sizes.family}, which is no export of allattn")
    return sizes


def _named_as_in_the_model(weights: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Without the prefix; a name that lacks it stays visible as one that no model has."""
    return {
        name.removeprefix(prefix) if name.startswith(prefix) else f"({name})": tensor
        for name, tensor in weights.items()
    }


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """What the special tokens are, by the names that transformers has for them."""
    tokens, unknown = {"bos_token": EOS, "eos_token": EOS, "pad_token": EOS}, unknown_id(tokenizer)
    return tokens if unknown is None else {**tokens, "unk_token": str(tokenizer.id_to_token(unknown))}


def _about_tokens(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """By file name, what transformers wants to know of the tokens.

    `<eos>` ends a line, not the text, so generation does not stop there; it begins a text and fills rows.
    """
    eos, tokens = tokenizer.token_to_id(EOS), special_tokens(tokenizer)
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "AllAttentionTokenizer",
            **tokens,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        },
        "special_tokens_map.json": tokens,
        "generation_config.json": {"bos_token_id": eos, "pad_token_id": eos, "max_new_tokens": NEW_TOKENS},
    }


def _refuse_existing(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise InputError(f"{folder}: exists already; give the export another folder")
