"""The pictures show the numbers they are drawn from, with units, legend and marks, always the same."""

import io
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from support.made_up import DENSE_LAYERS, PER_HEAD, config, history, result
from support.study_fixtures import PERPLEXITIES

from allattn.comparison.compared_run import finished_run
from allattn.comparison.pictures import draw_pictures
from allattn.comparison.runs_local import read_local_runs
from allattn.comparison.side_by_side import Comparison, side_by_side
from allattn.pictures.drawing import png, svg


@pytest.fixture(scope="module")
def comparison(study: Path) -> Comparison:
    runs, left_out = read_local_runs([study])
    return side_by_side(runs, left_out)


@pytest.fixture(scope="module")
def figures(comparison: Comparison) -> dict[str, Figure]:
    return draw_pictures(comparison)


def points(axes: Axes) -> set[tuple[float, float]]:
    return {
        (float(x), round(float(y), 6))
        for line in axes.lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
    }


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_perplexity_shows_every_run_and_the_papers_points(figures: dict[str, Figure]) -> None:
    own, paper = figures["perplexity"].axes
    x = DENSE_LAYERS - 4 * PER_HEAD
    runs = {(float(x), value) for by_seed in PERPLEXITIES.values() for value in by_seed.values()}
    means = {(float(x), round(math.fsum(by_seed.values()) / 3, 6)) for by_seed in PERPLEXITIES.values()}
    assert points(own) == runs | means | {(float(DENSE_LAYERS), 100.0)}
    ablations = {(30_704_640.0, round(24.85 + more, 6)) for more in (0, 0.12, 0.61, 1.25, 1.48)}
    assert points(paper) == ablations | {(54_566_912.0, 23.24)}
    for axes in (own, paper):
        assert "parameters of the layers, without the embedding side" in axes.get_xlabel()
        assert "test perplexity" in axes.get_ylabel()
    assert legend(own)[:2] == ["dense, before pruning (All-attention)", "full method (All-attention, pruned)"]
    assert len(legend(own)) == len(legend(paper)) == 6
    assert "WikiText-103" in paper.get_title()
    assert "not published" in paper.get_xlabel()


def test_heads_shows_the_count_of_every_layer_of_every_run(
    figures: dict[str, Figure], comparison: Comparison
) -> None:
    axes = figures["heads"].axes[0]
    (image,) = axes.images
    assert image.get_array().tolist() == [[0, 4, 4, 4]] * 15  # type: ignore[union-attr]
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(layer, run): str(4 if layer else 0) for run in range(15) for layer in range(4)}
    labels = [text.get_text() for text in axes.get_yticklabels()]
    seeds = [f"full method, seed {seed}" for seed in (1, 2, 3)]
    assert labels[:4] == [*seeds, "without lambda warm-up, seed 1"]
    assert axes.get_xlabel() == "layer"
    assert figures["heads"].axes[1].get_ylabel() == "heads kept"


def test_training_shows_curves_with_the_warm_up_and_the_freeze(figures: dict[str, Figure]) -> None:
    loss, valid, sparsity = figures["training"].axes
    for axes, unit in ((loss, "nats per token"), (valid, "nats per token"), (sparsity, "share of heads")):
        assert unit in axes.get_ylabel()
        curves = [line for line in axes.lines if len(line.get_xdata()) > 2]  # type: ignore[arg-type]
        assert len(curves) == 15
        marks = {line.get_xdata()[0] for line in axes.lines if line not in curves}  # type: ignore[index]
        assert marks == {75, 200}
    assert sparsity.get_xlabel() == "optimizer step"
    curve = sparsity.lines[0]
    assert list(curve.get_xdata())[-1] == 400  # type: ignore[arg-type]
    assert list(curve.get_ydata())[-2:] == [0.25, 0.25]  # type: ignore[arg-type]
    texts = [text.get_text() for text in figures["training"].legends[0].get_texts()]
    assert texts[-2:] == ["lambda's warm-up ends (step 75)", "freeze: closed heads go (step 200)"]
    assert texts[0] == "full method"


def test_every_variant_has_its_own_look() -> None:
    """Also where there are more variants than colours."""
    runs = [
        finished_run(str(i), str(i), config(**{"gates.lambda_max": 0.01 * i}), result(100 + i), history())
        for i in range(1, 21)
    ]
    drawn = draw_pictures(side_by_side(runs, []))
    curves = {(line.get_color(), line.get_linestyle()) for line in drawn["training"].axes[0].lines[:20]}
    means = {(line.get_color(), line.get_marker()) for line in drawn["perplexity"].axes[0].lines[1:]}
    assert len(curves) == len(means) == 20


def test_svg_is_well_formed_and_the_same_at_each_drawing(comparison: Comparison) -> None:
    first, second = (
        {name: svg(figure, name) for name, figure in draw_pictures(comparison).items()} for _ in range(2)
    )
    assert first == second
    for data in first.values():
        assert ET.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"


def test_png_can_be_read(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        image = Image.open(io.BytesIO(png(figure)))
        assert image.format == "PNG"
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20


def test_a_setting_with_dollar_signs_is_no_formula() -> None:
    """matplotlib would refuse the first, which is no formula it knows."""
    names = {"data.tokenizer": r"$\nosuchthing$", "trainer.precision": "$x_1$"}
    runs = [
        finished_run("a", "a", config("a"), result(120), history()),
        finished_run("b", "b", config("b", **names), result(121), history()),
        finished_run("c", "c", config("c", 2), result(121), history()),
    ]
    for figure in draw_pictures(side_by_side(runs, [], list(names))).values():
        assert png(figure)
