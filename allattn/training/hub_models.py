"""Models on the Hugging Face hub: huggingface:ORG/NAME in the place of a path."""

import re
from pathlib import Path
from typing import Any

from allattn.errors import InputError, first_line

PREFIX = "huggingface:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "README.md"]  # nothing that could be run


def hub_folder(name: str, **options: Any) -> Path:
    """The folder of a model's files, from the hub or from the Hugging Face cache.

    Args:
        name: ORG/NAME, perhaps with @REVISION, a branch, tag or commit.
        options: of `huggingface_hub.snapshot_download`.

    Raises:
        InputError: the name has another form, or the hub does not give the model and the cache lacks it.
    """
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
