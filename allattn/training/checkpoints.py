"""Checkpoint files: everything a run needs to go on, and everything a model needs to be rebuilt.

A checkpoint is Lightning's, with plain values only, so that it loads without running code. Its entry
`allattn` holds the format version, the model's sizes (heads kept per layer included), where the text came
from, the vocabulary's hash, the phase, and the segment memory by stream.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.errors import InputError, fits_kind
from allattn.families import sizes_from_dict
from allattn.files import write_atomically
from allattn.heads.ranking import Scope
from allattn.model.gated import Sizes
from allattn.pruning.phase import Phase
from allattn.training.restoring import check_sections, refusal
from allattn.training.segment_memory import by_stream, is_memory
from allattn.training.weights import check_weights, recorded_sizes

FORMAT_VERSION = 2  # 1 held the segment memory by process and accumulation group
_ENTRIES: dict[str, Any] = {
    "model": dict,
    "phase": str,
    "step": int,
    "best": float,
    "memory": list,
    "data": dict,
    "tokenizer_hash": str,
    "fingerprint": str,
    "output_scaling": bool | None,
    "target_sparsity": float | None,
}
# Not in those of earlier versions.
_ADDED: dict[str, Any] = {
    "segment_length": int,
    "tokens_seen": int,
    "teacher_memory": list,
    "heads_per_gate": int,
    "scope": str,
}
_RESUMED = ("optimizer_states", "lr_schedulers", "loops", "epoch", "global_step", "pytorch-lightning_version")
AFTER_GATES: dict[str, Any] = {"pi": list[list[float]], "heads_before": list[list[int]]}
# How often the run has removed heads, and its steps and tokens at the last time.
AFTER_CUT: dict[str, Any] = {"cuts": int, "cut_step": int, "cut_tokens": int}
MODEL_PREFIX, _GATES = "model.", "gates.pi."  # prefixes in the state dict


def write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write or replace a checkpoint; the folder is made where it is missing.

    Raises:
        OSError: `path` is named; the earlier checkpoint stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(path, lambda file: torch.save(checkpoint, file))
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's own writer, on a full disk
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"{path}: the checkpoint could not be written ({reason}); the earlier one stays"
        ) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint of this project to the CPU without unpickling anything but tensors and plain values.

    Raises:
        InputError: no such file, not a checkpoint, not one of this project, of a newer format, or its
            entries, weights or gates are not those of a model.
    """
    if path.is_dir():
        raise InputError(
            f"{path}: is a folder, as an export is; give the training checkpoint, RUN/checkpoints/last.ckpt"
        )
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint")
    try:
        with warnings.catch_warnings(action="ignore"):  # about old kinds of pickles
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        raise InputError(
            f"{path}: is not a checkpoint of allattn, or it is damaged (it does not load as plain tensors)"
        ) from None
    meta = checkpoint.get("allattn") if isinstance(checkpoint, dict) else None
    if not isinstance(meta, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError(f"{path}: is not a checkpoint of allattn (it has no allattn entry)")
    version = meta.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise InputError(
            f"{path}: has checkpoint format {version}, this version of allattn reads 1 and {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    known = AFTER_GATES | AFTER_CUT | _ADDED
    kinds = _ENTRIES | {name: kind for name, kind in known.items() if name in meta}
    wrong = [name for name, kind in kinds.items() if name not in meta or not fits_kind(meta[name], kind)]
    if meta.get("phase") not in [phase.value for phase in Phase]:
        wrong.append("phase")
    if wrong:
        raise InputError(f"{path}: is damaged: its allattn entry has no usable {', '.join(wrong)}")
    config = recorded_sizes(meta["model"], path)
    check_weights(config, model_weights(checkpoint["state_dict"]), path)
    _check_gates(checkpoint, config, path)
    if version == 1:
        _upgrade(meta, path)
    return checkpoint


def read_resumable(path: Path) -> dict[str, Any]:
    """`read_checkpoint` of one that training can go on from; before the first step it takes weights alone.

    Raises:
        InputError: as `read_checkpoint`, it lacks the optimizer's state or Lightning's, or one of them or the
            segment memory is not the model's.
    """
    checkpoint = read_checkpoint(path)
    missing = [name for name in _RESUMED if name not in checkpoint]
    if missing and checkpoint["allattn"]["step"]:
        raise InputError(f"{path}: no run can go on from it: it has no {', '.join(missing)}")
    meta = checkpoint["allattn"]
    config = sizes_from_dict(meta["model"])
    if not all(is_memory(memory, config) for memory in (meta["memory"], meta.get("teacher_memory", []))):
        raise refusal(path, "segment memory")
    if meta["step"] or "optimizer_states" in checkpoint:
        check_sections(checkpoint, path)
    return checkpoint


def _upgrade(meta: dict[str, Any], path: Path) -> None:
    """Turn an entry of format 1 into today's."""
    try:
        meta["memory"] = by_stream(meta["memory"])
    except (LookupError, TypeError, ValueError, RuntimeError):
        raise InputError(f"{path}: is damaged: its segment memory cannot be put together") from None
    meta["format_version"] = FORMAT_VERSION


def _check_gates(checkpoint: dict[str, Any], config: Sizes, path: Path) -> None:
    """Refuse gates, or their record after the removal, that do not belong to the model's heads."""
    meta = checkpoint["allattn"]
    wrong = False
    if has_gates(checkpoint):
        state, share = checkpoint["state_dict"], meta.get("heads_per_gate", 1)
        wrong |= share not in (1, config.heads_per_group)
        wrong |= meta.get("scope", Scope.all_layers.value) not in [scope.value for scope in Scope]
        for layer, present in enumerate(config.heads_present):
            pi = state.get(f"{_GATES}{layer}")
            wrong = wrong or not isinstance(pi, Tensor) or not torch.isfinite(pi).all()
            if wrong or pi.shape != (present // share,) or present % share:
                wrong = True
                break
        wrong |= config.scale_absorbed or meta["output_scaling"] is None
        wrong |= meta["target_sparsity"] is not None and not 0 <= meta["target_sparsity"] < 1
    elif "pi" in meta or "heads_before" in meta:
        lengths = [list(map(len, meta.get(name, []))) for name in AFTER_GATES]
        heads = range(config.heads)
        wrong = lengths[0] != lengths[1] or len(lengths[0]) != config.layers
        wrong |= any(head not in heads for layer in meta.get("heads_before", []) for head in layer)
    if wrong:
        raise InputError(f"{path}: is damaged: its gates do not belong to its heads")


def model_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights, by their names in the model, of a task's state dict."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in state.items()
        if isinstance(name, str) and name.startswith(MODEL_PREFIX)
    }


def cuts_done(checkpoint: dict[str, Any]) -> int:
    """How often the run that wrote a checkpoint had removed heads; earlier versions did so once at most."""
    meta = checkpoint["allattn"]
    cuts: int = meta.get("cuts", 1 if meta["phase"] == Phase.fine_tune.value else 0)
    return cuts


def has_gates(checkpoint: dict[str, Any]) -> bool:
    """Whether the checkpoint is from the gate phase."""
    return checkpoint["allattn"]["phase"] == Phase.gates.value


def gate_parameters(checkpoint: dict[str, Any]) -> list[Tensor]:
    """pi of a gate-phase checkpoint, one vector per layer with an entry for each of its gates."""
    layers = sizes_from_dict(checkpoint["allattn"]["model"]).layers
    return [checkpoint["state_dict"][f"{_GATES}{layer}"] for layer in range(layers)]
