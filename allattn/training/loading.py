"""Models from checkpoint files, and the vocabulary that lies beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from allattn.data.vocabulary import load_tokenizer, tokenizer_hash
from allattn.errors import InputError
from allattn.families import sizes_from_dict
from allattn.model.gated import GatedLM, Sizes
from allattn.training.checkpoints import has_gates, model_weights, read_checkpoint
from allattn.training.cutting import at_freeze
from allattn.training.weights import model_from_weights

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Loaded:
    """A model from a checkpoint and what the checkpoint says about it."""

    model: GatedLM  # closed gates, if there were any, are removed
    meta: dict[str, Any]


def load_model(path: Path) -> Loaded:
    """Rebuild the model of a checkpoint, dense or cut; from the gate phase, with its decided heads removed.

    Raises:
        InputError: as `read_checkpoint`, or the weights do not fit the recorded sizes.
    """
    return rebuild(read_checkpoint(path), path)


def rebuild(checkpoint: dict[str, Any], path: Path) -> Loaded:
    """`load_model` from a checkpoint that has been read already; `path` is for messages."""
    if has_gates(checkpoint):
        checkpoint = at_freeze(checkpoint)
    config = sizes_from_dict(checkpoint["allattn"]["model"])
    return Loaded(build_model(config, checkpoint["state_dict"], path), checkpoint["allattn"])


def checked_tokenizer(path: Path, checkpoint: dict[str, Any]) -> Path:
    """The tokenizer.json beside a checkpoint, once its hash is found to be the recorded one.

    Raises:
        InputError: it is missing, or it belongs to another vocabulary.
    """
    tokenizer = path.parent / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise InputError(f"{tokenizer}: is missing; the vocabulary of {path.name} must lie beside it")
    meta = checkpoint["allattn"]
    needs_eos = "model" not in meta or sizes_from_dict(meta["model"]).eos_ends_lines
    if tokenizer_hash(load_tokenizer(tokenizer, needs_eos)) != meta["tokenizer_hash"]:
        raise InputError(
            f"{tokenizer}: is not the vocabulary that {path.name} was trained with (another hash); "
            "put the right tokenizer.json beside the checkpoint"
        )
    return tokenizer


def build_model(config: Sizes, state: dict[str, Tensor], path: Path) -> GatedLM:
    """A model of these sizes with the weights of a task's state dict; all of them must fit.

    Raises:
        InputError: as `model_from_weights`.
    """
    return model_from_weights(config, model_weights(state), path)
