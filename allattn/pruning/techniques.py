"""The paper's three techniques, and which of them a run goes without."""

from collections.abc import Mapping
from typing import Any

TECHNIQUES = ("lambda warm-up", "positive initialization", "output scaling")


def techniques_off(settings: Mapping[str, Any]) -> list[str]:
    """Which of the three a run goes without, by its settings (by dotted name) and not by its label.

    Without learned gates there is no lambda and no initialization that could be off.
    """
    off = []
    if settings.get("gates.selection") == "l0":
        if settings.get("gates.lambda_warmup_steps") == 0:
            off.append(TECHNIQUES[0])
        if float(settings.get("gates.initial_pi", 2)) <= 0:
            off.append(TECHNIQUES[1])
    if settings.get("gates.output_scaling") is False:
        off.append(TECHNIQUES[2])
    return off
