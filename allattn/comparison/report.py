"""Tables, notes and pictures as one HTML page that needs nothing else, and a report's files."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from allattn.comparison.text_tables import TextTable
from allattn.errors import InputError
from allattn.files import write_atomically
from allattn.pictures.drawing import Figure, png


def rendered(
    template: str,
    title: str,
    tables: Sequence[TextTable],
    notes: Sequence[str],
    pictures: Mapping[str, bytes],
    settings: Mapping[str, Any],
    settings_title: str = "Settings",
    **more: Any,
) -> str:
    """A page. Every text in it is escaped: names of runs and settings may hold anything.

    Args:
        template: report.html.jinja, or one that extends it, of this folder.
        title: of the page.
        tables: one below the other.
        notes: below the tables.
        pictures: SVG by caption.
        settings: by name, at the page's end.
        settings_title: above them.
        more: what the template asks for.
    """
    environment = Environment(
        loader=PackageLoader("allattn.comparison", "."), autoescape=True, undefined=StrictUndefined
    )
    shown = [{"caption": caption, "data": b64encode(data).decode()} for caption, data in pictures.items()]
    return environment.get_template(template).render(
        title=title,
        tables=tables,
        notes=notes,
        pictures=shown,
        settings=settings,
        settings_title=settings_title,
        **more,
    )


def write_files(
    folder: Path, texts: Mapping[str, str], figures: Mapping[str, Figure], vectors: Mapping[str, bytes]
) -> dict[str, Path]:
    """Write a report into a folder, which is made where it is missing; the PNG files by name.

    Args:
        folder: earlier files of these names are replaced.
        texts: by name of the file.
        figures: by name.
        vectors: the same as SVG.

    Raises:
        InputError: the folder cannot be written.
    """
    images = {name: folder / f"{name}.png" for name in figures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
        for name, figure in figures.items():
            write_atomically(folder / f"{name}.svg", vectors[name])
            write_atomically(images[name], png(figure))
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be written ({error.strerror})") from None
    return images
