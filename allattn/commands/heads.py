"""The heads a checkpoint keeps and what that saves: allattn heads checkpoint=PATH [format=json]."""

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from allattn.commands.run_command import Command
from allattn.record.head_map import draw_head_map, head_record, print_head_map
from allattn.training.artifacts import local_checkpoint
from allattn.training.checkpoints import read_checkpoint


class Format(Enum):
    """What goes to standard output."""

    text = "text"
    json = "json"


@dataclass
class HeadsSettings:
    """Settings of the command."""

    checkpoint: str = MISSING  # dense, cut, or of the gate phase
    format: Format = Format.text
    picture: str | None = None  # a PNG file to draw layers x heads into


def show_heads(settings: HeadsSettings) -> dict[str, Any]:
    """Print the record of a checkpoint's heads, and draw it if wanted; the record.

    Raises:
        InputError: the checkpoint cannot be read or the picture cannot be written.
    """
    path = local_checkpoint(settings.checkpoint)
    record = head_record(read_checkpoint(path))
    title = f"{path.parent.parent.name} {path.name}".strip()
    if settings.picture is not None:
        picture = Path(settings.picture)
        draw_head_map(record, picture, title)
        print(f"{picture}: layers x heads", file=sys.stderr)
    if settings.format is Format.json:
        print(json.dumps(record, indent=2))
    else:
        print_head_map(record, title)
    return record


COMMAND = Command("heads", HeadsSettings, show_heads)
