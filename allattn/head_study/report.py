"""A study's files: record, tables, pictures, page; and the same in W&B."""

from pathlib import Path

from allattn.comparison.report import rendered, write_files
from allattn.comparison.text_tables import latex_tables, markdown_tables
from allattn.comparison.upload import Destination, log_report
from allattn.head_study.pictures import captions, draw_pictures
from allattn.head_study.result import StudyResult
from allattn.head_study.tables import TITLE, csv_tables, notes, text_tables
from allattn.pictures.drawing import svg
from allattn.training.config import WandbMode

JOB_TYPE = "study"


def write_report(result: StudyResult, folder: Path) -> dict[str, Path]:
    """Write every form of the result; the PNG files by name.

    Raises:
        InputError: the folder cannot be written.
    """
    figures, said = draw_pictures(result), captions(result)
    vectors = {name: svg(figure, name) for name, figure in figures.items()}
    tables, lines = text_tables(result), notes(result)
    shown = {said[name]: data for name, data in vectors.items()}
    texts = {
        "table.md": markdown_tables(tables, lines),
        "table.tex": latex_tables(tables, lines),
        **csv_tables(result),
        "report.html": rendered("report.html.jinja", TITLE, tables, lines, shown, result.settings),
    }
    return write_files(folder, texts, figures, vectors)


def upload_report(
    result: StudyResult, pictures: dict[str, Path], folder: Path, mode: WandbMode, destination: Destination
) -> str:
    """Log tables and pictures as a job of type study; one line that says where they are.

    Raises:
        InputError: W&B does not take the run.
    """
    summary = {"perplexity": result.unmasked.perplexity} | {
        f"perplexity/{point.mask.value}/{point.score}/{point.asked:g}"
        + ("" if point.seed is None else f"/seed_{point.seed}"): measured.perplexity
        for point, measured in result.points.items()
    }
    return log_report(
        JOB_TYPE,
        f"head study of {result.model}",
        result.settings,
        text_tables(result),
        pictures,
        summary,
        folder,
        mode,
        destination,
    )
