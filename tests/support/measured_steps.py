"""Most resident bytes of training steps, for a process of its own: python measured_steps.py, JSON on stdout.

With glibc's MALLOC_MMAP_THRESHOLD_ small and fixed, what is freed is given back, and the peak is that of what
is held. The first steps of every shape are not counted: libraries keep kernels for it.
"""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import torch

from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.subject import Subject, Variant, new_model
from allattn.model.config import ModelConfig
from allattn.model.cores.choose import CORES
from allattn.model.cores.workspace import ON_CPU

PRECISIONS = {"32-true": "float32", "bf16-mixed": "bfloat16"}
WIDE: dict[str, Any] = {"vocabulary_size": 2000, "layers": 3, "width": 128, "heads": 4, "cutoffs": [500]}
DEEP: dict[str, Any] = {"vocabulary_size": 20_000, "layers": 5, "width": 256, "heads": 8, "cutoffs": [4000]}
SIZES = {  # model, rows; segments are as long as the memory
    "wide scores": (ModelConfig(**WIDE, persistent_vectors=512, memory_length=64, position_rows=65), 12),
    "many words": (ModelConfig(**DEEP, persistent_vectors=128, memory_length=96, position_rows=97), 6),
}


def resident(entry: str) -> int:
    """Bytes that the system says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(entry)).split()[1])


def peak(size: str, core: str, precision: str) -> int:
    """Of two steps, on top of weights and the memory of the segment before."""
    model, rows = SIZES[size]
    config = BenchmarkConfig(model=model, batch_size=rows, segment_length=model.memory_length)
    variant = Variant("", PRECISIONS[precision], CORES[core])
    for _ in range(2):
        gc.collect()
        ON_CPU.kept = threading.local()
        subject = Subject(new_model(model, 0), config, variant, torch.device("cpu"))
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        before = resident("VmRSS")
        for _ in range(2):
            subject.training_step()
        found = resident("VmHWM") - before
        del subject
    return found


CASES = [(size, core, "32-true") for size in SIZES for core in CORES]
CASES += [("many words", core, "bf16-mixed") for core in CORES]

if __name__ == "__main__":
    print(json.dumps([[*case, peak(*case)] for case in CASES]))
