"""How fast the model is on this machine: allattn benchmark [model.layers=16] [heads=[8,4,2]]."""

import json
from pathlib import Path
from typing import Any

from allattn.benchmark.config import BenchmarkConfig, check_benchmark
from allattn.benchmark.measure import measure
from allattn.benchmark.ratios import summarize
from allattn.benchmark.table import markdown
from allattn.commands.opened import device_named, open_saved
from allattn.commands.run_command import Command
from allattn.errors import InputError
from allattn.families import all_attention
from allattn.files import write_atomically
from allattn.settings import plain


def benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Measure, write benchmark.json and benchmark.md, print the tables; the record.

    Raises:
        InputError: a setting, the device, the checkpoint or the folder cannot be used.
    """
    check_benchmark(config)
    device = device_named(config.device)
    pruned = None
    if config.checkpoint is not None:
        pruned = all_attention(open_saved(config.checkpoint, "cpu", progress=False).model, "benchmark")
    folder = Path(config.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be created ({error.strerror})") from None
    record = {"settings": plain(config), **measure(config, pruned, device)}
    record["summary"] = summarize(record)
    tables = markdown(record)
    print(tables)
    try:
        write_atomically(folder / "benchmark.json", json.dumps(record, indent=1) + "\n")
        write_atomically(folder / "benchmark.md", tables)
    except OSError as error:
        raise InputError(f"folder={folder}: cannot be written ({error.strerror})") from None
    return record


COMMAND = Command("benchmark", BenchmarkConfig, benchmark)
