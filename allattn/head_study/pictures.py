"""A study's pictures: its numbers as plain values, drawn by the room of pictures."""

import math
import statistics

from allattn.head_study.result import Mask, StudyResult
from allattn.head_study.summaries import Quantity, deviation, quantities
from allattn.pictures.drawing import Figure
from allattn.pictures.grids import draw_grid
from allattn.pictures.shares import ShareCurve, draw_shares


def draw_pictures(result: StudyResult) -> dict[str, Figure]:
    """All pictures by file name, without ending; the curves first."""
    found = {}
    if result.points:
        for each in quantities(result):
            panels = {f"{mask.value} mask": _curves(result, mask, each) for mask in result.masks()}
            log = each.task is None
            found[f"curves_{_file(each.name)}"] = draw_shares(panels, f"test {each.name}", log)
    for name, values in result.scores.items():
        found[f"score_{name}"] = draw_grid(values, f"{name}, mean over the text", "head", "layer", name)
    if result.agreement:
        found["agreement"] = _draw_agreement(result)
    return found | _draw_reading(result)


def captions(result: StudyResult) -> dict[str, str]:
    """What each picture shows, by its name."""
    against = "against the share of heads really zeroed; random with one standard deviation to each side."
    found = {f"curves_{_file(each.name)}": f"{each.name} {against}" for each in quantities(result)}
    found |= {f"score_{name}": f"{name} of every head, layers by heads." for name in result.scores}
    return found | {
        "agreement": "Spearman's correlation between scores over all heads.",
        "block_norms": "Frobenius norm of every head's block of WO.",
        "effective_ranks": "Effective rank of every head's block of WO.",
        "shares_of_output": "Share of Y that every head gives; the shares of a layer sum to one.",
        "columns": "How strongly each output of one layer (a column of WO) reads each head.",
        "rows": "How strongly each width of each head of one layer (a row of WO) writes.",
        "cosines": "Cosines between the mean contributions of the heads of one layer.",
    }


def _file(name: str) -> str:
    return "".join(sign if sign.isalnum() else "_" for sign in name)


def _curves(result: StudyResult, mask: Mask, quantity: Quantity) -> list[ShareCurve]:
    drawn = []
    for name in result.names(mask):
        points = [(0.0, quantity.value(result.unmasked), 0.0)]
        for asked in result.asked(mask):
            if found := result.at(mask, name, asked):
                values = [quantity.value(each) for each in found]
                spread = 0.0 if math.isnan(over_seeds := deviation(values)) else over_seeds
                share = statistics.fmean(each.share for each in found)
                points.append((share, statistics.fmean(values), spread))
        drawn.append(ShareCurve(name, points))
    return drawn


def _draw_agreement(result: StudyResult) -> Figure:
    names = list(dict.fromkeys(name for each in result.agreement for name in (each.one, each.other)))
    known = {(name, name): 1.0 for name in names}
    for each in result.agreement:
        known[each.one, each.other] = known[each.other, each.one] = each.spearman
    grid = [[known[one, other] for other in names] for one in names]
    return draw_grid(grid, "agreement of scores", "", "", "Spearman", names=names, signed=True)


def _draw_reading(result: StudyResult) -> dict[str, Figure]:
    reading = result.reading
    if reading is None:
        return {}
    read = {each.layer: each for each in reading.layers}
    layers = range(len(result.heads))
    by_head = {
        "block_norms": [read[layer].block_norms if layer in read else [] for layer in layers],
        "effective_ranks": [read[layer].effective_ranks if layer in read else [] for layer in layers],
        "shares_of_output": [read[layer].shares_of_output if layer in read else [] for layer in layers],
    }
    found = {
        name: draw_grid(values, name.replace("_", " "), "head", "layer", name.replace("_", " "))
        for name, values in by_head.items()
    }
    of = f"layer {reading.viewed}"
    found["columns"] = draw_grid(
        reading.columns, f"{of}: columns of WO", "output", "head", "norm over a head"
    )
    found["rows"] = draw_grid(
        reading.rows, f"{of}: rows of WO", "width of the head", "head", "norm of the row"
    )
    found["cosines"] = draw_grid(
        read[reading.viewed].cosines, f"{of}: cosines", "head", "head", "cosine", signed=True
    )
    return found
