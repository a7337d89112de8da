"""Tables, notes and pictures as one HTML page that needs nothing else."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from allattn.comparison.text_tables import TextTable


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
