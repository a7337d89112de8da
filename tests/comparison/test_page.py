"""report.html: everything is in it, nothing is fetched, no name becomes markup; a browser shows it."""

import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from support.made_up import OFF, config, history, result

from allattn.comparison.compared_run import LeftOut, finished_run
from allattn.comparison.page import html_page
from allattn.comparison.pictures import draw_pictures
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.comparison.tables import run_cells, text_tables
from allattn.pictures.drawing import svg

SCRIPT = "<script>document.title='taken'</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_of(comparison: Comparison) -> str:
    return html_page(
        comparison, {name: svg(figure, name) for name, figure in draw_pictures(comparison).items()}
    )


class Read(HTMLParser):
    """Tags, links and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    runs, left_out = read_local_runs([study])
    return page_of(side_by_side(runs, [*left_out, LeftOut("runs/late", "unfinished")]))


@pytest.fixture(scope="module")
def hostile() -> str:
    """A page of runs whose name, place and settings are markup."""
    runs = [
        finished_run(SCRIPT, f"runs/{SCRIPT}", config(SCRIPT, 1), result(120), history()),
        finished_run("b", "runs/b", config("b", 2, **{"data.tokenizer": SCRIPT}), result(121), history()),
        finished_run("c", "runs/c", config("c", 1, **OFF["init"]), result(122), history()),
        finished_run("d", "runs/d", config("d", 2), result(121), history()),
    ]
    return page_of(side_by_side(runs, [LeftOut(f"x {SCRIPT}", f"failed: {SCRIPT}")], ["data.tokenizer"]))


def test_everything_is_in_the_page(page: str, study: Path) -> None:
    comparison = side_by_side(*read_local_runs([study]))
    read = Read(page)
    for row in [*(row for table in text_tables(comparison) for row in table.rows), *run_cells(comparison)]:
        assert all(cell in read.text for cell in row)
    assert "runs/late: unfinished" in read.text
    assert "optimizer.learning_rate" in read.text, "shared settings"
    assert "gates.lambda_max" in read.text
    assert "gates.output_scaling" not in read.text, "not shared"
    assert read.tags.count("img") == 4
    assert all(value for tag, name, value in read.attributes if (tag, name) == ("img", "alt"))


def test_nothing_is_fetched(page: str, hostile: str) -> None:
    for text in (page, hostile):
        read = Read(text)
        assert not {"script", "link", "iframe", "object", "embed", "base", "form", "video"} & set(read.tags)
        for tag, name, value in read.attributes:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "action", "data"):
                assert value.startswith("data:image/svg+xml;base64,"), (tag, name)
        assert "url(" not in text
        assert "@import" not in text
        policy = next(value for _, name, value in read.attributes if name == "content" and "src" in value)
        assert "default-src 'none'" in policy


def test_names_are_text(hostile: str) -> None:
    read = Read(hostile)
    assert read.text.count(SCRIPT) >= 6, "run, place, variant twice, left out and why"
    assert "script" not in read.tags
    assert read.tags.count("img") == 4


def test_the_page_is_the_same_at_each_writing(page: str, study: Path) -> None:
    runs, _ = read_local_runs([study])
    assert page_of(side_by_side(runs, [LeftOut("runs/late", "unfinished")])) == page


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_the_page(page: str, hostile: str, tmp_path: Path) -> None:
    """Headless, without a network: the pictures are drawn, and nothing ran."""
    assert BROWSER is not None
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "hostile.html").write_text(hostile)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,3600"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]

    def browse(*arguments: str) -> str:
        command = [str(BROWSER), *options, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    shown = browse("--dump-dom", (tmp_path / "hostile.html").as_uri())
    assert "<title>Pruning runs, by variant</title>" in shown
    shot = tmp_path / "page.png"
    browse(f"--screenshot={shot}", (tmp_path / "page.html").as_uri())
    image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")
    colours = {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in image.getcolors(1 << 24) or []}  # type: ignore[misc]
    drawn = set(re.findall("#[0-9A-F]{6}", "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00"))
    assert drawn <= colours, "the curves and points of all five variants are on the page"
    assert "#B34700" in colours, "the bar beside what was left out"
