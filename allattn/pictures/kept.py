"""How many heads each layer keeps."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from allattn.pictures.drawing import new_figure, plain_text


def draw_kept(
    counts: Sequence[Sequence[int]], labels: Sequence[str], groups: Sequence[str], heads: int
) -> Figure:
    """Runs x layers, coloured by the number of heads kept.

    Args:
        counts: of each run, by layer; runs may differ in layers.
        labels: of the runs.
        groups: a line is drawn between runs of two groups.
        heads: of a dense layer.
    """
    layers = max(map(len, counts))
    figure = new_figure(5.5 + 0.42 * layers, 1.6 + 0.32 * len(counts))
    axes = figure.subplots()
    grid = [[*row, *[float("nan")] * (layers - len(row))] for row in counts]
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=heads, aspect="auto")
    for place, row in enumerate(counts):
        for layer, count in enumerate(row):
            colour = "white" if count > 0.6 * heads else "black"
            axes.text(layer, place, str(count), ha="center", va="center", color=colour, fontsize="small")
    axes.set_yticks(range(len(counts)), labels)
    axes.set_xticks(range(layers))
    axes.set(xlabel="layer", title=f"heads kept per layer (dense: {heads})")
    for start in range(1, len(counts)):
        if groups[start] != groups[start - 1]:
            axes.axhline(start - 0.5, color="black", linewidth=1)
    figure.colorbar(image, ax=axes, label="heads kept", ticks=range(0, heads + 1, max(1, heads // 4)))
    return plain_text(figure)
