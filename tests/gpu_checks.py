"""What only a GPU can tell, in one table: python tests/gpu_checks.py [SECTION ...] [--folder FOLDER].

Each section runs in a process of its own, which adds its rows to a file one by one: what is measured stays
when a section fails, and what does not fit the memory is a row. When time is up, the rest is left out, and a
row says so. With --device cpu --size tiny it goes through anywhere, which tells nothing but that it does.

Exit status: 0; 1 where something is wrong or missing; 2 without a GPU.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from support.cores import LARGER, SHAPES, Shape, error, make, with_tensors
from support.fused_attention import attend_flex, attend_sdpa
from support.measured_steps import PRECISIONS

from allattn.benchmark.config import WIKITEXT103, BenchmarkConfig
from allattn.benchmark.memory import peak_of
from allattn.benchmark.subject import Subject, Variant, new_model, with_heads, zipf_ids
from allattn.benchmark.table import markdown_table
from allattn.benchmark.yardstick import attend_yardstick
from allattn.commands.run_command import run_command
from allattn.commands.train import COMMAND as TRAIN
from allattn.devices import float32_products
from allattn.files import write_atomically
from allattn.model.config import ModelConfig
from allattn.model.cores.choose import CORES, choose
from allattn.model.cores.inputs import Core
from allattn.record.timing import in_turn
from allattn.training.config import OptimizerName
from allattn.training.environment import device_name, environment
from allattn.training.fitting import GIB, training_bytes
from allattn.training.metrics import read_metrics
from allattn.training.runner import is_out_of_memory
from allattn.training.utilization import peak_flops, utilization

TRAINING = {variant: setting for setting, variant in PRECISIONS.items()}  # trainer.precision by Variant's
TF32_EPS, BFLOAT16_EPS = 2**-10, 2**-7
NO_DROPOUT = [f"model.{name}_dropout=0" for name in ("attention", "projection", "input", "output", "word")]
Row = dict[str, Any]
Section = Callable[["Size", torch.device], Iterator[Row]]


@dataclass(frozen=True)
class Size:
    """What is measured."""

    model: ModelConfig
    streams: int  # B
    tokens: int  # T
    groups: int  # of accumulation, with which the plain core fits too
    repeats: int
    losses: list[str]  # settings of the runs whose losses are compared
    layers: dict[str, Shape]  # inputs of one core


TINY = {"layers": 2, "width": 32, "heads": 2, "persistent_vectors": 8, "memory_length": 8, "cutoffs": [100]}
SIZES = {
    "paper": Size(
        model=ModelConfig(vocabulary_size=WIKITEXT103),
        streams=192,
        tokens=192,
        groups=8,
        repeats=5,
        losses=["schedule.steps=12"],
        layers={
            "the paper's layer": (16, 192, 192, 8, 64, 2048, 192),
            "small's layer": (16, 64, 64, 8, 24, 256, 64),
        },
    ),
    "tiny": Size(
        model=ModelConfig(vocabulary_size=500, **TINY),  # type: ignore[arg-type]
        streams=4,
        tokens=8,
        groups=2,
        repeats=2,
        losses=["schedule.steps=3", "schedule.batch_size=2", "model.layers=1", "model.cutoffs=[]"],
        layers={"a layer": (2, 8, 8, 2, 16, 8, 8)},
    ),
}


def cores(size: Size, device: torch.device) -> Iterator[Row]:
    """Values and gradients against plain arithmetic in float64 on the CPU; short dtypes as the yardstick."""
    for name, core in CORES.items():
        exactly = max(error(core, make(shape, device=device.type)) for shape in (*SHAPES.values(), LARGER))
        yield _judged(f"{name}, float64", "error", exactly, 1e-10)
        for dtype in (torch.float32, torch.bfloat16):
            inputs = make(LARGER, dtype, scales=(1.0, 1.0), device=device.type)
            bound = 3 * error(attend_yardstick, inputs) + 4 * torch.finfo(dtype).eps
            yield _judged(f"{name}, {dtype}", "error", error(core, inputs), bound)


def losses(size: Size, device: torch.device) -> Iterator[Row]:
    """Losses of the first steps of experiment=small without dropout, which a GPU draws otherwise.

    A few roundings of the products' factors, TF32's or bfloat16's, may show in them.
    """
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        exact = _losses(Path(folder), "cpu", "32-true", size.losses)
        for precision, eps in (("32-true", TF32_EPS), ("bf16-mixed", BFLOAT16_EPS)):
            found = _losses(Path(folder), accelerator, precision, size.losses)
            off = max(abs(x / y - 1) for x, y in zip(found, exact, strict=True))
            case = f"{len(exact)} steps of small, {precision}"
            yield _judged(case, "losses off the CPU's by a share of", off, 4 * eps)


def _losses(folder: Path, accelerator: str, precision: str, settings: list[str]) -> list[float]:
    """Of every step of a run on words with natural frequencies."""
    name = f"{accelerator}-{precision}"
    for split, tokens in (("train", 40_000), ("valid", 400), ("test", 400)):
        words = " ".join(f"w{word}" for word in zipf_ids(9_000, tokens, seed=len(split)))
        (folder / f"wiki.{split}.tokens").write_text(words + "\n", encoding="utf-8")
    own = [f"name={name}", f"runs_folder={folder}", f"trainer.accelerator={accelerator}"]
    own += [f"trainer.precision={precision}", f"data.folder={folder}", f"data.cache_folder={folder}/cache"]
    same = ["experiment=small", "data=files", "data.minimum_count=1", "schedule.warmup_steps=0"]
    same += ["trainer.log_interval=1", "trainer.progress=false", "logger=none", *NO_DROPOUT, *settings]
    run_command(TRAIN, [*same, *own])
    return [float(row["loss"]) for row in read_metrics(folder / name / "metrics.csv")]


def steps(size: Size, device: torch.device) -> Iterator[Row]:
    """A step of training in one group and in some, per core and precision."""
    for precision in TRAINING:
        for name in CORES:
            for groups in (1, size.groups):
                yield from _step(size, device, Variant(name, precision, CORES[name]), groups)


def compiled(size: Size, device: torch.device) -> Iterator[Row]:
    """The compiled layers, which take the plain core, beside the same in some groups without."""
    torch._dynamo.config.recompile_limit = 8 * size.model.layers  # as a run sets it
    for by in (False, True):
        variant = Variant("plain, compiled" if by else "plain", "bfloat16", CORES["plain"], by)
        yield from _step(size, device, variant, size.groups)


def pruned(size: Size, device: torch.device) -> Iterator[Row]:
    """Half of the heads against all, as they are after the freeze."""
    half = with_heads(size.model, [size.model.heads // 2] * size.model.layers)
    core = choose("auto", device, compiled=False)
    for name, model in (("all heads", size.model), ("half of the heads", half)):
        variant = Variant(f"{core}, {name}", "bfloat16", CORES[core])
        yield from _step(replace(size, model=model), device, variant, 1)


def _step(size: Size, device: torch.device, variant: Variant, groups: int) -> Iterator[Row]:
    """One row: tokens/s, MFU and memory, or that it does not fit."""
    rows, dense = size.streams // groups, size.model.heads_kept is None
    row: Row = {"case": f"{variant.name}, {variant.precision}, {rows} streams at a time"}
    if dense and not variant.compiled:
        core = next(name for name, core in CORES.items() if core is variant.core)
        how = (core, TRAINING[variant.precision], OptimizerName.lamb)
        row["calculated_bytes"] = training_bytes(size.model, rows, size.tokens, *how)
    try:
        row |= _measured_step(size, device, variant, groups)
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        row["result"] = "out of memory"
    gc.collect()
    torch.cuda.empty_cache()
    yield row


def _measured_step(size: Size, device: torch.device, variant: Variant, groups: int) -> Row:
    config = BenchmarkConfig(
        model=size.model, batch_size=size.streams // groups, segment_length=size.tokens, seed=1
    )
    with float32_products("high"):  # as a run on a GPU
        subject = Subject(new_model(size.model, config.seed), config, variant, device)
        held = sum(x.nbytes for x in (*subject.model.parameters(), *subject.memory))

        def step() -> None:
            subject.optimizer.zero_grad()
            for _ in range(groups):
                subject.micro_batch()
            subject.update()

        peak = peak_of(lambda: (step(), step()), device)
        seconds = median(in_turn({"": step}, size.repeats, device)[""])
    row: Row = {"tokens_per_second": size.streams * size.tokens / seconds}
    row["peak_bytes"] = None if peak is None else held + peak
    if (flops := peak_flops(None, device)) is not None:
        row["mfu"] = utilization(size.model, size.tokens, row["tokens_per_second"], flops)
    return row


def evaluation(size: Size, device: torch.device) -> Iterator[Row]:
    """torch's scaled_dot_product_attention against the cores, without dropout or gradient."""
    return _against(size, device, attend_sdpa, "scaled_dot_product_attention")


def flex(size: Size, device: torch.device) -> Iterator[Row]:
    """torch's flex_attention, which must be compiled, in the same way."""
    return _against(size, device, attend_flex, "flex_attention")


def _against(size: Size, device: torch.device, core: Core, name: str) -> Iterator[Row]:
    """Times in turn: median and quartiles of the ratios within one round."""
    all_cores: dict[str, Core] = {"recompute": CORES["recompute"], "plain": CORES["plain"], name: core}
    for label, shape in size.layers.items():
        for dtype in (torch.float32, torch.bfloat16):
            leaves = make(shape, dtype, scales=(shape[4] ** 0.5, shape[5] ** 0.5), device=device.type)
            inputs = with_tensors(leaves, [x.detach() for x in leaves.tensors])  # flex asks it on a CPU
            with torch.no_grad():
                actions = {one: partial(call, inputs) for one, call in all_cores.items()}
                seconds = in_turn(actions, 2 * size.repeats, device)
            for one, taken in seconds.items():
                ratios = [x / y for x, y in zip(taken, seconds["recompute"], strict=True)]
                low, middle, high = quantiles(ratios, n=4)
                yield {
                    "case": f"{label}, {one}, {dtype}",
                    "tokens_per_second": shape[0] * shape[1] / median(taken),
                    "result": f"{middle:.2f} of recompute's time ({low:.2f} to {high:.2f})",
                }


def _judged(case: str, what: str, found: float, bound: float) -> Row:
    held = found <= bound
    result = f"{what} {found:.1e}, at most {bound:.1e}: {'ok' if held else 'WRONG'}"
    return {"case": case, "result": result, "ok": held}


SECTIONS: dict[str, Section] = {
    section.__name__: section for section in (cores, losses, steps, pruned, evaluation, compiled, flex)
}


def run_section(name: str, size: str, device: torch.device, rows: Path) -> None:
    """Measure in this process; every row is in the file, a line of JSON, as soon as it is known."""
    for row in SECTIONS[name](SIZES[size], device):
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"section": name, **row}) + "\n")


def in_a_process(name: str, size: str, device: torch.device, rows: Path, seconds: float) -> str | None:
    """`run_section` in a process of its own; what went wrong, None where nothing did."""
    command = [sys.executable, __file__, name, "--size", size, "--device", str(device), "--rows", str(rows)]
    try:
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "stopped: time is up"
    if not ended.returncode:
        return None
    said = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
    return f"failed: {said[-1]}"


def collect(
    names: Sequence[str], until: float, run: Callable[[str, Path, float], str | None], least: float = 20
) -> list[Row]:
    """The rows of all sections, and one for each that failed or was left out.

    Args:
        names: of sections, in order.
        until: time.monotonic() at which all ends.
        run: takes a section's name, the file for its rows and the seconds left; what went wrong.
        least: seconds with which a section is begun.
    """
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            left, rows = until - time.monotonic(), Path(folder) / name
            wrong = run(name, rows, left) if left >= least else "left out: time is up"
            if rows.exists():
                found += [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
            if wrong:
                found.append({"section": name, "case": "", "result": wrong, "ok": False})
    return found


HEAD = ["section", "case", "tokens/s", "MFU", "peak, GiB", "calculated, GiB", "result"]


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of HEAD."""

    def shown(key: str, form: str, unit: float = 1) -> str:
        value = row.get(key)
        return "" if value is None else format(value / unit, form)

    return [
        row["section"],
        row["case"],
        shown("tokens_per_second", ",.0f"),
        shown("mfu", ".1%"),
        shown("peak_bytes", ".2f", GIB),
        shown("calculated_bytes", ".2f", GIB),
        row.get("result", ""),
    ]


def main(words: Sequence[str]) -> int:
    """Measure, print the table and write it beside its JSON; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-checks"))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one section, in its process
    given = parser.parse_args(words)
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here: torch sees none (--device cpu --size tiny tries the script)", file=sys.stderr)
        return 2
    if given.rows:
        run_section(given.sections[0], given.size, given.device, given.rows)
        return 0

    until = time.monotonic() + 60 * given.minutes
    names = given.sections or list(SECTIONS)
    rows = collect(names, until, lambda *args: in_a_process(args[0], given.size, given.device, *args[1:]))
    about = f"{device_name(given.device)}, size {given.size}, torch {torch.__version__}"
    table = Table(*HEAD, title=about)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=180).print(table)
    given.folder.mkdir(parents=True, exist_ok=True)
    record = {"device": device_name(given.device), "environment": environment(), "rows": rows}
    write_atomically(given.folder / "gpu_checks.json", json.dumps(record, indent=1) + "\n")
    markdown = f"{about}\n\n{markdown_table(HEAD, [cells(row) for row in rows])}\n"
    write_atomically(given.folder / "gpu_checks.md", markdown)
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
