"""The comparison as one HTML page that needs nothing else: no network, no script, no other file."""

from allattn.comparison.pictures import CAPTIONS
from allattn.comparison.report import rendered
from allattn.comparison.side_by_side import Comparison
from allattn.comparison.tables import TITLE, notes, run_cells, run_columns, text_tables
from allattn.comparison.variants import shared_settings


def html_page(comparison: Comparison, pictures: dict[str, bytes]) -> str:
    """The page.

    Args:
        comparison: what to show.
        pictures: SVG by name.
    """
    return rendered(
        "page.html.jinja",
        TITLE,
        text_tables(comparison),
        notes(comparison),
        {CAPTIONS[name]: data for name, data in pictures.items()},
        shared_settings(comparison.runs),
        settings_title="Settings that all runs share",
        tokens=comparison.runs[0].text[2],
        variants=len(comparison.labels()),
        warnings=comparison.warnings,
        left_out=comparison.left_out,
        run_columns=run_columns(comparison),
        runs=run_cells(comparison),
    )
