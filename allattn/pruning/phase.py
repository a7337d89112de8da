"""Where a run is."""

from enum import Enum


class Phase(Enum):
    """What the optimizer steps of a run, or of a part of it, train."""

    pretrain = "pretrain"
    gates = "gates"  # weights and gates, up to the freeze
    fine_tune = "fine_tune"  # what is left after the removal
