"""Models elsewhere in the place of a path: W&B artifacts, wandb:ENTITY/PROJECT/NAME:ALIAS, and the hub's."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allattn.errors import InputError, first_line
from allattn.files import file_hash, user_path, write_atomically
from allattn.training.hub_models import PREFIX as HUB_PREFIX
from allattn.training.hub_models import hub_folder
from allattn.training.wandb_variables import LONGEST_NAME

if TYPE_CHECKING:
    import wandb

PREFIX = "wandb:"
_FORM = re.compile(r"[^/:]+/[^/:]+/[^/:]+:[^/:]+")
_NOTE = "artifact.txt"  # beside a checkpoint: its hash and the artifact that it is


def local_checkpoint(reference: str) -> Path:
    """Path of a checkpoint or an export, downloaded first where `reference` names one of W&B or the hub.

    An artifact lands in artifacts/ENTITY/PROJECT/NAME:VERSION, below WANDB_ARTIFACT_DIR if that is set.

    Raises:
        InputError: the reference is empty or has another form, there is no login, or W&B or the hub does not
            give it.
    """
    if not reference:
        raise InputError("checkpoint= is empty: give the path of a checkpoint")
    if reference.startswith(HUB_PREFIX):
        return hub_folder(reference.removeprefix(HUB_PREFIX))
    if not reference.startswith(PREFIX):
        return user_path("checkpoint", reference)
    name = reference.removeprefix(PREFIX)
    if not _FORM.fullmatch(name):
        raise InputError(f"checkpoint={reference}: the form is wandb:ENTITY/PROJECT/NAME:ALIAS")
    import wandb

    try:
        artifact = wandb.Api().artifact(name)
        version = f"{name.rpartition(':')[0]}:{artifact.version}"
        folder = Path(os.environ.get("WANDB_ARTIFACT_DIR", "artifacts")) / version
        artifact.download(root=str(folder))
    except Exception as error:  # no network, no login, no such artifact: all of them the user's to mend
        raise InputError(
            f"checkpoint={reference}: W&B does not give it ({first_line(error)}); run `wandb login`, "
            "or give a path"
        ) from None
    checkpoints = sorted(folder.glob("*.ckpt"))
    if len(checkpoints) != 1:
        raise InputError(f"checkpoint={reference}: holds {len(checkpoints)} .ckpt files, not one")
    note_artifact(checkpoints[0], version)
    return checkpoints[0]


def to_be_uploaded(run_name: str, result: dict[str, Any], files: list[Path]) -> "wandb.Artifact":
    """An artifact of type `model` with these files and the run's result, nested: W&B takes 100 keys."""
    import wandb

    name = re.sub(r"[^\w.-]+", "-", run_name)[-LONGEST_NAME:]
    artifact = wandb.Artifact(name, type="model", metadata=result)
    for file in files:
        artifact.add_file(str(file), policy="immutable", skip_cache=True)
    return artifact


def note_artifact(checkpoint: Path, qualified_name: str) -> None:
    """Write down beside a checkpoint which artifact it is."""
    write_atomically(checkpoint.parent / _NOTE, f"{file_hash(checkpoint)} {qualified_name}\n")


def forget_artifact(checkpoint: Path) -> None:
    """The checkpoint is no longer what was put up."""
    (checkpoint.parent / _NOTE).unlink(missing_ok=True)


def artifact_source(checkpoint: str) -> str | None:
    """The artifact that a checkpoint is: named by the reference, or noted beside the file.

    A file beside the one that was put up, or one that has changed since, is none.
    """
    if checkpoint.startswith(PREFIX):
        return checkpoint.removeprefix(PREFIX)
    path = user_path("checkpoint", checkpoint)
    note = path.parent / _NOTE
    if not note.is_file():
        return None
    noted, _, name = note.read_text(encoding="utf-8").strip().partition(" ")
    return name if noted == file_hash(path) else None
