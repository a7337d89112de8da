"""Models on the Hugging Face hub and folders like theirs: huggingface:ORG/NAME, or huggingface:FOLDER."""

import json
import re
from pathlib import Path
from typing import Any

from allattn.errors import InputError, first_line
from allattn.files import user_path
from allattn.training.exports import MODEL_TYPE

PREFIX = "huggingface:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Nothing that could be run; the last three are of tokenizers of others.
_FILES = ["*.json", "*.safetensors", "README.md", "merges.txt", "tokenizer.model", "*.jinja"]


def hub_folder(name: str, **options: Any) -> Path:
    """The folder of a model's files, from the hub or from the Hugging Face cache.

    Args:
        name: ORG/NAME, perhaps with @REVISION, a branch, tag or commit; a folder is itself.
        options: of `huggingface_hub.snapshot_download`.

    Raises:
        InputError: the name has another form, or the hub does not give the model and the cache lacks it.
    """
    if name and (folder := user_path("checkpoint", name)).is_dir():
        return folder
    model, _, revision = name.partition("@")
    if not _NAME.fullmatch(model):
        raise InputError(f"{name}: is no folder, and no model of the hub, whose form is ORG/NAME")
    from huggingface_hub import snapshot_download

    options = {"revision": revision or None, **options}
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES, **options))
    except Exception as error:  # no network, no such model, no right to read it: the user's to mend
        raise InputError(
            f"{PREFIX}{name}: the hub does not give it and the cache lacks it ({first_line(error)}); "
            "give the folder of an export"
        ) from None


def is_foreign(path: Path) -> bool:
    """Whether it is a folder with a model of others: a config.json that is not ours, or a .gguf file.

    Raises:
        InputError: there are several .gguf files.
    """
    if not path.is_dir():
        return False
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return gguf_file(path) is not None
    except (OSError, ValueError, RecursionError):
        return False  # damaged: an export's reader says so
    kind = config.get("model_type") if isinstance(config, dict) else None
    return isinstance(kind, str) and kind != MODEL_TYPE


def gguf_file(folder: Path) -> Path | None:
    """The one .gguf file of a folder without safetensors; None where there is none.

    Raises:
        InputError: there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise InputError(f"{folder}: holds {len(found)} .gguf files; give a folder with one of them")
    return found[0] if found else None
