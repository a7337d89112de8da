"""Which heads a model still has, counted in one way for every family; see `Sizes`."""


class HeadsKept:
    """What follows from the heads that each layer keeps.

    Attributes:
        layers: L.
        heads: H of a layer before any removal.
        heads_kept: original indices, per layer; None = all H.
        output_scale: s_g of each layer; None = 1.0.
    """

    layers: int
    heads: int
    heads_kept: list[list[int]] | None
    output_scale: list[float] | None

    def kept(self, layer: int) -> list[int]:
        """Original indices of the heads that `layer` has."""
        return list(range(self.heads)) if self.heads_kept is None else list(self.heads_kept[layer])

    @property
    def heads_present(self) -> list[int]:
        """h of every layer."""
        return [len(self.kept(layer)) for layer in range(self.layers)]

    @property
    def heads_kept_total(self) -> int:
        """Heads of all layers that the model has."""
        return sum(self.heads_present)

    @property
    def heads_total(self) -> int:
        """L * H, the heads of all layers before any removal."""
        return self.layers * self.heads

    def scale(self, layer: int) -> float:
        """The constant s_g of `layer`."""
        return 1.0 if self.output_scale is None else float(self.output_scale[layer])
