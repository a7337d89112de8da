"""allattn benchmark from its command line."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.command_fixtures import CommandLine

from allattn.benchmark.ratios import summarize
from allattn.benchmark.subject import Variant
from allattn.benchmark.table import markdown

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


@pytest.fixture
def run(command_line: CommandLine) -> Run:
    """Run the command: exit status, standard output, standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        done = command_line("benchmark", *arguments)
        return done.status, done.out, done.err

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
    assert record["peak_bytes"] == record["pruned"]["peak_bytes"] == {}, "not asked for"


def test_command_on_a_transformer_xl(run: Run) -> None:
    """Products with persistent vectors do not exist; those of the feed-forward sublayer count."""
    sizes = ["model.persistent_vectors=0", "model.feed_forward=9", "peak_memory=false", "repeats=1"]
    status, _, err = run(*TINY, *sizes)
    assert status == 0, err
    record = json.loads(Path("out/benchmark.json").read_text())
    counted = record["multiply_adds"]
    assert counted["feed_forward"] == 2 * 2 * 8 * 2 * 32 * 9  # layers, rows, tokens; two maps of d x F
    assert counted["layers"] == sum(counted[part] for part in ("core", "projections", "feed_forward"))
    assert {entry["name"] for entry in record["products"]["float32"]} == {
        "square 16",
        "square 32",
        "projection",
    }


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
