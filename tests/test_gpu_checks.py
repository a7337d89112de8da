"""The script for a GPU runs to its end on a CPU, and goes on behind a section that does not."""

import json
import time
from pathlib import Path

import pytest
import torch
from gpu_checks import SECTIONS, collect, main, run_section
from support.cores import LARGER, exact, loop, make, with_tensors
from support.fused_attention import attend_flex

CPU = torch.device("cpu")
COMPILING = ("compiled", "flex")  # a minute


def rows_of(name: str, folder: Path) -> list[dict[str, object]]:
    run_section(name, "tiny", CPU, folder / "rows")
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in COMPILING])
def test_a_section(name: str, tmp_path: Path) -> None:
    rows = rows_of(name, tmp_path)
    assert len(rows) >= 2
    assert all(row.get("ok", True) and row["section"] == name for row in rows)
    assert all("result" in row or row["tokens_per_second"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILING)
def test_a_section_that_compiles(name: str, tmp_path: Path) -> None:
    assert len(rows_of(name, tmp_path)) >= 2


@pytest.mark.slow
def test_flex_attention_does_the_same() -> None:
    """Up to the rounding of sums over 183 keys."""
    inputs = exact(make(LARGER, torch.float32, scales=(1.0, 1.0)))
    given = with_tensors(inputs, [x.detach().float() for x in inputs.tensors])
    with torch.no_grad():
        wanted, found = loop(inputs), attend_flex(given)
    assert (found.double() - wanted).abs().max() < 183 * torch.finfo(torch.float32).eps * wanted.abs().max()


def test_out_of_memory_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gpu_checks.peak_of", none_left)
    results = [row["result"] for row in rows_of("pruned", tmp_path)]
    assert results == ["out of memory"] * 2


def test_a_failure_ends_nothing_and_time_is_kept() -> None:
    """What a section has measured before it fails stays."""

    def run(name: str, rows: Path, seconds: float) -> str | None:
        rows.write_text(json.dumps({"section": name, "case": "first"}) + "\n")
        if name == "b":
            time.sleep(1.1)
        return "failed: a fault" if name == "a" else None

    found = collect(["a", "b", "c"], time.monotonic() + 2, run, least=1)
    assert [(row["section"], row.get("result")) for row in found] == [
        ("a", None),
        ("a", "failed: a fault"),
        ("b", None),
        ("c", "left out: time is up"),
    ]


def test_one_table_on_the_terminal_and_in_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A section in a process of its own; one that fails there."""
    words = ["--device", "cpu", "--size", "tiny", "--folder", str(tmp_path)]
    assert main(["cores", *words]) == 0
    table = (tmp_path / "gpu_checks.md").read_text()
    assert table.count("| cores |") == 6
    assert len(json.loads((tmp_path / "gpu_checks.json").read_text())["rows"]) == 6
    assert "recompute, float64" in capfd.readouterr().out
    assert main(["cores", *words, "--minutes", "0.01"]) == 1
    assert "left out: time is up" in (tmp_path / "gpu_checks.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
