"""The heads a model keeps and what that saves: allattn heads checkpoint=PATH [format=json]."""

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from allattn.commands.opened import SavedSettings, open_saved
from allattn.commands.run_command import Command
from allattn.record.head_map import draw_head_map, head_record, print_head_map


class Format(Enum):
    """What goes to standard output."""

    text = "text"
    json = "json"


@dataclass
class HeadsSettings(SavedSettings):
    """Settings of the command."""

    format: Format = Format.text
    picture: str | None = None  # a PNG file to draw layers x heads into


def show_heads(settings: HeadsSettings) -> dict[str, Any]:
    """Print the record of a model's heads, and draw it if wanted; the record.

    Raises:
        InputError: the model cannot be read or the picture cannot be written.
    """
    opened = open_saved(settings.checkpoint, settings.device, settings.progress)
    record = head_record(opened.checkpoint)
    run = "" if opened.path.is_dir() else opened.path.parent.parent.name
    title = f"{run} {opened.path.name}".strip()
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
