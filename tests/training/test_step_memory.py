"""The calculated memory of a step against a process's peak, and what it is made of."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.measured_steps import CASES, SIZES

from allattn.training.config import OptimizerName
from allattn.training.step_memory import StepMemory, step_memory

Peaks = dict[tuple[str, str, str], int]


def calculated(size: str, core: str, precision: str = "32-true", **changes: object) -> StepMemory:
    model, rows = SIZES[size]
    return step_memory(replace(model, **changes), rows, model.memory_length, core, precision)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    """By size, core and precision, measured in one process of its own."""
    script = Path(__file__).parents[1] / "support" / "measured_steps.py"
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return {(size, core, precision): peak for size, core, precision, peak in json.loads(run.stdout)}


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(("size", "core", "precision"), CASES)
def test_calculation_is_the_measured_peak(peaks: Peaks, size: str, core: str, precision: str) -> None:
    found = calculated(size, core, precision)
    assert found.moments + found.step == pytest.approx(peaks[size, core, precision], rel=0.15)


def test_a_layer_of_the_recomputing_core_holds_no_scores() -> None:
    """It holds the dropout masks as bits; the plain one probabilities, noise and products of the two."""
    model, rows = SIZES["wide scores"]
    T, N = model.memory_length, model.persistent_vectors
    scores = rows * model.heads * T * (2 * T + N)
    for core, least, most in (("plain", 12 * scores, 21 * scores), ("recompute", scores / 8, 4 * scores)):
        two, three = (calculated("wide scores", core, layers=layers).held for layers in (2, 3))
        assert least < three - two < most


def test_weights_moments_and_memory_are_those_of_the_sizes() -> None:
    model, rows = SIZES["many words"]
    found = calculated("many words", "plain")
    assert found.segment_memory == 4 * model.layers * rows * model.memory_length * model.width
    assert found.moments == 2 * found.weights
    assert found.total == found.weights + found.moments + found.segment_memory + found.step
    double = calculated("many words", "plain", "64-true")
    assert double.total == 2 * found.total
    muon = step_memory(model, rows, 96, "plain", optimizer=OptimizerName.muon)
    assert found.weights < muon.moments < found.moments
