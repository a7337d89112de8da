"""The benchmark: counts against torch's own, actions that do what they say, tables, and the command."""

import copy
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from allattn.benchmark.arithmetic import forward_products, training_products
from allattn.benchmark.config import BenchmarkConfig
from allattn.benchmark.memory import peak_bytes
from allattn.benchmark.subject import Subject, Variant, new_model, text, with_heads, zipf_ids
from allattn.benchmark.summary import summarize
from allattn.benchmark.table import markdown
from allattn.benchmark.yardstick import attend_yardstick
from allattn.commands.benchmark import main
from allattn.commands.run_command import register_command, run_command
from allattn.model.config import ModelConfig
from allattn.model.cores.core import attend, attend_plain
from allattn.record.timing import in_turn

CPU = torch.device("cpu")
TINY = [
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.persistent_vectors=6",
    "model.memory_length=8",
    "model.position_rows=16",
    "model.vocabulary_size=400",
    "model.cutoffs=[20,60]",
    "batch_size=2",
    "segment_length=8",
    "heads=[2,0,3]",
    "squares=[16,32]",
    "repeats=3",
    "folder=out",
]
Run = Callable[..., tuple[int, str, str]]


def tiny(cutoffs: tuple[int, ...] = (20, 60), **changes: Any) -> BenchmarkConfig:
    sizes: dict[str, Any] = {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "persistent_vectors": 6,
        "memory_length": 8,
    }
    model = ModelConfig(vocabulary_size=400, position_rows=16, cutoffs=list(cutoffs), **sizes)
    return BenchmarkConfig(model=model, batch_size=4, segment_length=8, **changes)


def subject(config: BenchmarkConfig, heads: list[int] | None = None, **variant: Any) -> Subject:
    sizes = config.model if heads is None else with_heads(config.model, heads)
    return Subject(new_model(sizes, 1), config, Variant("any", **variant), CPU)


class NoModules(nullcontext[None]):
    """In place of the counter's record by module, which does not work under `torch.autograd.grad`."""

    parents = frozenset({"Global"})


def operations(action: Callable[[], None]) -> int:
    """Operations that torch counts in matrix products."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter:
        action()
    return counter.get_total_flops()


@pytest.mark.parametrize("core", [attend_plain, attend_yardstick])
@pytest.mark.parametrize("heads", [[4, 4], [3, 1, 0, 2], [0]], ids=str)
@pytest.mark.parametrize("cutoffs", [(20, 60), ()], ids=str)
def test_multiply_adds_are_half_of_torchs_operations(
    core: Any, heads: list[int], cutoffs: tuple[int, ...]
) -> None:
    one = subject(tiny(cutoffs), heads, core=core)
    counted = forward_products(one.model.config, one.segment.inputs, one.segment.targets)
    for parts, training, inference in (
        (counted.layers, one.layers_training, one.layers_inference),
        (counted.core, one.core_training, None),
        (counted.softmax, one.softmax_training, None),
        (counted.embedding, one.embedding_training, None),
        (counted.total, None, one.evaluation),
    ):
        for action, expected in ((training, training_products(parts)), (inference, parts)):
            if action is not None:
                assert operations(action) == 2 * expected
    step = operations(one.training_step)
    read = forward_products(one.model.config, one.segment.inputs, one.segment.targets)
    assert step == 2 * training_products(read.total)


def test_zipf_words_touch_every_band_at_the_papers_size() -> None:
    ends = [0, 20_000, 40_000, 200_000, 267_735]
    config = BenchmarkConfig()
    stream = text(config, config.model)
    for index in range(len(stream)):
        segment = stream.micro_batch(index)
        assert segment.targets.shape == (4, 192)
        counts, _ = np.histogram(segment.targets, ends)
        assert counts.min() > 0
        assert counts[0] > 0.7 * segment.targets.numel()
    ids = zipf_ids(1000, 200_000, 0)
    assert ids.min() == 0
    assert ids.max() == 999
    share = np.log(11) / np.log(1001)  # of the ten most frequent words, where P ~ 1 / (rank + 1)
    assert (ids < 10).mean() == pytest.approx(share, rel=0.02)


def test_variants_compute_the_same_model() -> None:
    config = tiny()
    for name in ("attention", "projection", "input", "output", "word"):
        setattr(config.model, f"{name}_dropout", 0.0)
    ours, yardstick = subject(config, core=attend), subject(config, core=attend_yardstick)
    before = copy.deepcopy(ours.model.state_dict())
    yardstick.memory = ours.memory
    for one in (ours, yardstick):
        one.training_step()
    after = [one.model.state_dict() for one in (ours, yardstick)]
    for name, start in before.items():
        torch.testing.assert_close(after[0][name], after[1][name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(after[0][name], start), name


def test_actions_leave_the_gradients_of_the_step() -> None:
    one = subject(tiny(), precision="bfloat16")
    one.training_step()
    grads = [p.grad.clone() for p in one.model.parameters()]
    assert all(grad.dtype == torch.float32 for grad in grads)
    for action in (one.layers_training, one.core_training, one.softmax_training, one.embedding_training):
        action()
    for kept, p in zip(grads, one.model.parameters(), strict=True):
        assert torch.equal(kept, p.grad)


def test_actions_take_turns_and_the_first_round_is_a_warm_up() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, CPU)
    assert calls == ["a", "b"] * 4
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for taken in seconds.values() for value in taken)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peak_memory_is_that_of_the_scores() -> None:
    """Wide scores: 8 rows x 4 heads x 64 x (128 + 4096) float32 is 34.6 MB; autograd keeps several."""
    config = tiny(squares=[8])
    config.model.memory_length, config.model.position_rows = 64, 128
    config.model.persistent_vectors, config.model.layers = 4096, 1
    config.batch_size, config.segment_length = 8, 64
    scores = 8 * 4 * 64 * (128 + 4096) * 4
    plain, ours = (
        peak_bytes(config, Variant("", core=core), "layers_training", CPU)
        for core in (attend_yardstick, attend)
    )
    assert plain is not None
    assert ours is not None
    assert 3 * scores < plain < 12 * scores
    assert ours < 0.5 * plain


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        status = 0
        try:
            run_command(main, register_command("benchmark", BenchmarkConfig), None, BenchmarkConfig)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return command


def check_ratios(record: dict[str, Any]) -> None:
    """Every ratio of the summary, from the raw repetitions again."""
    summary, raw = record["summary"], record["steps"]
    ours, plain = raw["training_step"]["float32"]["ours"], raw["training_step"]["float32"]["yardstick"]
    mixed = raw["training_step"]["bfloat16"]["ours"]
    row = summary["steps"]["float32"]["ours"]
    assert row["faster"]["training_step"] == pytest.approx(median(plain) / median(ours))
    against = summary["steps"]["bfloat16"]["ours"]["training_step_against_float32_yardstick"]
    assert against == pytest.approx(median(plain) / median(mixed))
    assert row["tokens_per_second"]["training_step"] == pytest.approx(
        record["tokens_per_step"] / median(ours)
    )
    rates = {x["name"]: x["multiply_adds"] / median(x["seconds"]) for x in record["products"]["float32"]}
    rate = max(rates.values())
    assert summary["rates"]["float32"]["multiply_adds_per_second"] == pytest.approx(rate)
    assert rates.keys() >= {"square 16", "projection", "scores", "values", "gradient of keys or values"}
    counted = record["multiply_adds"]
    alone = 3 * counted["projections"] / rates["projection"]
    for name in ("scores", "values", "gradient of keys or values"):
        alone += counted["core"] / rates[name]
    reached = 3 * counted["layers"] / alone / rate
    assert summary["rates"]["float32"]["products_alone"] == pytest.approx(reached)
    layers = median(raw["layers_training"]["float32"]["ours"])
    reached = 3 * record["multiply_adds"]["layers"] / layers / rate
    assert row["share_of_rate"]["layers_training"] == pytest.approx(reached)
    parts = summary["parts"]["float32"]["ours"]
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["attention core"] == pytest.approx(
        median(raw["core_training"]["float32"]["ours"]) / median(ours)
    )
    for what, by_precision in record["one_layer"]["seconds"].items():
        for precision, by_heads in by_precision.items():
            dense = median(by_heads[str(record["one_layer"]["heads"])])
            for kept, seconds in by_heads.items():
                assert summary["one_layer"][what][precision][kept] == pytest.approx(median(seconds) / dense)
    for what, by_precision in record["pruned"]["seconds"].items():
        for precision, names in by_precision.items():
            ratio = median(names["pruned"]) / median(names["dense"])
            assert summary["pruned"]["against_dense"][what][precision] == pytest.approx(ratio)
    for target in summary["targets"]:
        if target["reached"] is not None:
            beyond = target["reached"] - target["limit"]
            assert target["met"] == (beyond >= 0 if target["at_least"] else beyond <= 0)


def test_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(config: Any, variant: Variant, action: str, device: torch.device) -> int:
        return len(variant.name) + len(variant.precision) * len(action)

    monkeypatch.setattr("allattn.benchmark.measure.peak_bytes", peak)
    status, out, err = run(*TINY)
    assert status == 0
    assert "measuring" in err
    record = json.loads(Path("out/benchmark.json").read_text())
    assert out.rstrip("\n") == Path("out/benchmark.md").read_text().rstrip("\n")
    assert summarize(record) == record["summary"]
    assert markdown(record).rstrip("\n") == out.rstrip("\n")
    check_ratios(record)
    assert record["pruned"]["heads_kept"] == [2, 0, 3]
    assert record["summary"]["pruned"]["share_kept"] == pytest.approx(5 / 12)
    for section in (record["steps"], record["one_layer"]["seconds"], record["pruned"]["seconds"]):
        for what, by_precision in section.items():
            assert set(by_precision) == {"float32"} | ({"bfloat16"} if what != "generated_token" else set())
            assert all(len(x) == 3 for names in by_precision.values() for x in names.values())
    assert record["settings"]["model"]["width"] == 32
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert record["peak_bytes"]["evaluation"]["bfloat16"] == {"yardstick": 9 + 8 * 10, "ours": 4 + 8 * 10}
    peak = {"dense": 4 + 7 * 13, "pruned": 4 + 7 * 13}
    assert record["pruned"]["peak_bytes"]["training_step"]["float32"] == peak
    peaks = {
        name: row["peak_against_yardstick"] for name, row in record["summary"]["steps"]["float32"].items()
    }
    assert peaks["yardstick"] == {"training_step": 1, "evaluation": 1}
    assert peaks["ours"]["training_step"] == pytest.approx((4 + 7 * 13) / (9 + 7 * 13))


def test_command_with_a_checkpoint(run: Run, random_model: Callable[..., Any], tmp_path: Path) -> None:
    from allattn.training.checkpoints import FORMAT_VERSION, write_checkpoint

    model = random_model(heads_kept=[[1, 4], [0], []], output_scale=[4.0, 8.0, 8.0])
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    entry = {"format_version": FORMAT_VERSION, "model": model.config.to_dict(), "phase": "fine_tune"}
    entry |= {"step": 1, "best": 5.0, "memory": [{}], "data": {}, "tokenizer_hash": "t", "fingerprint": "f"}
    entry |= {"output_scaling": None, "target_sparsity": None}
    write_checkpoint(tmp_path / "cut.ckpt", {"state_dict": state, "allattn": entry})
    status, _, err = run(*TINY, "checkpoint=cut.ckpt", "peak_memory=false", "repeats=1")
    assert status == 0, err
    record = json.loads(Path("out/benchmark.json").read_text())
    assert record["pruned"]["heads_kept"] == [2, 1, 0]
    assert record["summary"]["pruned"]["heads_total"] == 24
    assert {t["reached"] for t in record["summary"]["targets"] if "memory" in t["target"]} == {None}


def test_bad_settings_are_one_line(run: Run) -> None:
    for message, arguments in {
        "heads=[9]": ["heads=[9]"],
        "batch_size=0": ["batch_size=0"],
        "did you mean repeats": ["repeat=3"],
        "no such checkpoint": ["checkpoint=nothing.ckpt"],
        "device=cuda:77": ["device=cuda:77"],
        "squares=[]": ["squares=[]"],
        "model.vocabulary_size is not set": ["model.vocabulary_size=null"],
    }.items():
        status, out, err = run(*TINY, *arguments)
        assert (status, out) == (2, ""), message
        assert message in err
        assert err.count("\n") == 1


def made_up() -> dict[str, Any]:
    """A record whose ratios can be read off: yardstick 4 s, ours 1 s in float32 and 0.5 s in bfloat16."""
    whole = ("training_step", "evaluation", "layers_training", "layers_inference")
    yardstick = {"float32": [9.0, 4.0, 1.0], "bfloat16": [1.0, 1.0, 8.0]}
    ours = {"float32": [1.0, 1.0, 3.0], "bfloat16": [0.5, 0.25, 0.75]}
    times = {p: {"yardstick": yardstick[p], "ours": ours[p]} for p in ours}
    part = {p: {"yardstick": [0.1], "ours": [0.1]} for p in ours}
    parts = ("core_training", "softmax_training", "embedding_training", "update", "data")
    peaks = {p: {"yardstick": 400 * 2**20, "ours": 100 * 2**20} for p in ours}
    one = {p: {"8": [2.0], "6": [1.5], "4": [1.2], "2": [0.5]} for p in ours}
    pair = {p: {"dense": [2.0], "pruned": [1.25]} for p in ours}
    of_a_layer = ("projection", "scores", "values", "gradient of keys or values")
    products: list[dict[str, Any]] = [
        {"name": name, "shape": [1, 2, 3], "multiply_adds": 4 * 10**9, "seconds": [1.0]}
        for name in of_a_layer
    ]
    return {
        "settings": {
            "batch_size": 4,
            "segment_length": 192,
            "repeats": 3,
            "model": {"layers": 4, "width": 512, "heads": 8, "persistent_vectors": 2048, "memory_length": 192}
            | {"vocabulary_size": 267_735},
        },
        "machine": {"torch": "2", "device": "cpu", "threads": 2, "cores": 2, "load_average_before": 0.0},
        "tokens_per_step": 768,
        "products": {
            p: [
                {
                    "name": "square 2",
                    "shape": [2, 2, 2],
                    "multiply_adds": 8 * 10**9,
                    "seconds": [2.0, 1.0, 1.0],
                },
                {"name": "square 4", "shape": [4, 4, 4], "multiply_adds": 64 * 10**9, "seconds": [16.0]},
                *products,
            ]
            for p in ours
        },
        "multiply_adds": {"layers": 2 * 10**9, "total": 3 * 10**9, "core": 10**9, "projections": 10**9},
        "steps": {**dict.fromkeys(whole, times), **dict.fromkeys(parts, part)},
        "peak_bytes": {"training_step": peaks, "evaluation": peaks},
        "one_layer": {"heads": 8, "seconds": {"layers_training": one, "layers_inference": one}},
        "pruned": {"heads": 8, "heads_kept": [6, 3], "seconds": dict.fromkeys(whole, pair)}
        | {"peak_bytes": {"evaluation": {"float32": {"dense": 3 * 2**20, "pruned": 2 * 2**20}}}},
    }


def test_table_of_a_made_up_record() -> None:
    record = made_up()
    record["summary"] = summarize(record)
    rows = {
        cells[0]: cells[1:]
        for line in reversed(markdown(record).splitlines())
        if line.startswith("|")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert rows["square 2"] == ["2 x 2 x 2", "8.0", "8.0"]
    assert "it would reach 50% in float32 and 50% in bfloat16 of the product rate" in markdown(record)
    assert rows["whole model, evaluation, float32"] == ["2,000.0", "1,250.0", "0.625", "384", "614", "3", "2"]
    assert rows["ours float32"] == [
        "768",
        "1,000.0",
        "4.00x",
        "4.00x",
        "100",
        "0.25",
        "1,000.0",
        "4.00x",
        "75%",
    ]
    targets = {t["target"]: (t["limit"], t["reached"], t["met"]) for t in record["summary"]["targets"]}
    best = "training step in the best precision against the float32 yardstick"
    assert targets["training step against the yardstick, float32"] == (2.0, 4.0, True)
    assert targets["training step against the yardstick, bfloat16"] == (1.8, 2.0, True)
    assert targets[best] == (3.0, 8.0, True)
    assert targets["layers' training arithmetic against the product rate, float32"] == (0.6, 0.75, True)
    name = "inference of a layer with 4 of 8 heads"
    assert targets[f"{name}, float32"] == (pytest.approx(0.55), 0.6, False)
    assert targets[f"{name}, bfloat16"] == (pytest.approx(0.6), 0.6, True)
    assert targets["layers' inference with 9 of 16 heads, float32"] == (
        pytest.approx(0.61875),
        0.625,
        False,
    )
    freeze = "layers' training after the freeze, 9 of 16 heads, float32"
    assert targets[freeze] == (pytest.approx(0.61875), 0.625, False)
    assert rows[freeze] == ["at most 0.619", "0.625", "no"]
    assert record["summary"]["parts"]["float32"]["ours"] == pytest.approx(
        {
            "attention core": 0.1,
            "projections and norms": 0.9,
            "adaptive softmax": 0.1,
            "embedding": 0.1,
            "optimizer": 0.1,
            "data": 0.1,
            "rest": -0.4,
        }
    )
