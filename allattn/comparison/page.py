"""The comparison as one HTML page that needs nothing else: no network, no script, no other file."""

from base64 import b64encode

from jinja2 import Environment, PackageLoader, StrictUndefined

from allattn.comparison.pictures import CAPTIONS
from allattn.comparison.side_by_side import Comparison
from allattn.comparison.tables import TITLE, notes, run_cells, run_columns, text_tables
from allattn.comparison.variants import shared_settings


def html_page(comparison: Comparison, pictures: dict[str, bytes]) -> str:
    """The page. Every text in it is escaped: names of runs and settings may hold anything.

    Args:
        comparison: what to show.
        pictures: SVG by name.
    """
    loader = PackageLoader("allattn.comparison", ".")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        "page.html.jinja"
    )
    return template.render(
        title=TITLE,
        tokens=comparison.runs[0].text[2],
        variants=len(comparison.labels()),
        warnings=comparison.warnings,
        left_out=comparison.left_out,
        tables=text_tables(comparison),
        notes=notes(comparison),
        pictures=[
            {"caption": CAPTIONS[name], "data": b64encode(data).decode()} for name, data in pictures.items()
        ],
        run_columns=run_columns(comparison),
        runs=run_cells(comparison),
        settings=shared_settings(comparison.runs),
    )
