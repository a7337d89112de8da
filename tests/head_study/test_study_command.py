"""A study of tiny models from the command line, killed and resumed, and what it refuses."""

import csv
from pathlib import Path

import pytest
import torch
from support.command_fixtures import CommandLine, Ended
from support.run_fixtures import Runs

from allattn.commands.evaluate import EvaluateSettings, evaluate
from allattn.head_study import report
from allattn.head_study.record import RECORD
from allattn.heads.scores import SCORES
from allattn.training.loading import load_model
from allattn.training.run_folder import RunFolder

TINY = ("calibration.tokens=120", "test.tokens=50", "length=10", "rows=2", "random_seeds=2", "progress=false")
BOTH = ("mask=static,dynamic", "share=0.25,0.5", "score=ahon_ln,wanda")


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def done(ended: Ended) -> Ended:
    assert ended.status == 0, ended.err
    return ended


def test_every_score_in_every_form(
    command_line: CommandLine, dense_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows without memory, in which all scores have a meaning."""
    monkeypatch.setattr(report, "draw_pictures", lambda result: {})  # which take most of the time
    checkpoint = f"checkpoint={dense_run.last}"
    ended = done(
        command_line("study", checkpoint, *TINY, "mask=static,dynamic", "share=0.25", "memory=false")
    )
    folder = tmp_path / "head_study"
    found = rows(folder, "points.csv")
    by_sequence = {name for name, score in SCORES.items() if score.per_sequence}
    assert {row["score"] for row in found if row["mask"] == "static"} == set(SCORES)
    assert {row["score"] for row in found if row["mask"] == "dynamic"} == by_sequence
    assert {int(row["tokens"]) for row in found} == {50}
    assert {float(row["share"]) for row in found if row["mask"] == "static"} == {0.25}
    for name in ("table.md", "table.tex", "report.html"):
        assert "saves no time" in (folder / name).read_text()
    assert "saves no time" in ended.out
    assert len(rows(folder, "heads.csv")) == 8


def test_a_killed_study_goes_on_to_the_same_record(
    command_line: CommandLine, dense_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "draw_pictures", lambda result: {})  # which take most of the time
    words = ("study", f"checkpoint={dense_run.last}", *TINY, *BOTH, "output.read=true")
    done(command_line(*words, "folder=whole"))
    whole = (tmp_path / "whole" / RECORD).read_text().splitlines()
    read = [row for row in rows(tmp_path / "whole", "heads.csv") if row["layer"] == "1"]
    masses = [[float(row[f"mass_on_{kind}"]) for kind in ("memory", "segment", "persistent")] for row in read]
    assert [sum(each) for each in masses] == pytest.approx([1.0] * len(read))
    assert all(min(each) > 0 for each in masses)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / RECORD).write_text("\n".join([*whole[:7], whole[7][:40]]))
    done(command_line(*words, "folder=cut"))
    again = (cut / RECORD).read_text().splitlines()
    assert again == whole
    done(command_line(*words, "folder=cut"))
    assert (cut / RECORD).read_text().splitlines() == whole, "nothing is measured twice"
    assert (cut / "table.md").read_text() == (tmp_path / "whole" / "table.md").read_text()
    done(command_line(*words, "folder=cut", "length=12"))
    assert len((cut / RECORD).read_text().splitlines()) == 2 * len(whole), "another length is another study"


def test_the_mask_is_what_zeroed_blocks_of_the_projection_give(
    command_line: CommandLine, dense_run: RunFolder, tmp_path: Path
) -> None:
    """The lowest heads by the study's own scores, zeroed in the weights: `evaluate` gives its perplexity."""
    checkpoint = torch.load(dense_run.last, weights_only=True)
    words = ("calibration.tokens=120", "length=10", "rows=2", "random_seeds=1", "progress=false")
    done(command_line("study", f"checkpoint={dense_run.last}", *words, "score=ahon_ln", "share=0.25"))
    folder = tmp_path / "head_study"
    by_score = sorted(rows(folder, "heads.csv"), key=lambda row: float(row["ahon_ln"]))
    width = load_model(dense_run.last).model.config.head_width
    for row in by_score[:2]:
        (name,) = [n for n in checkpoint["state_dict"] if n.endswith(f"layers.{row['layer']}.output.weight")]
        first = int(row["head"]) * width
        checkpoint["state_dict"][name][:, first : first + width] = 0
    changed = dense_run.last.with_name("zeroed.ckpt")
    torch.save(checkpoint, changed)
    try:
        scored = evaluate(EvaluateSettings(str(changed), progress=False))
    finally:
        changed.unlink()
    (masked,) = [row for row in rows(folder, "points.csv") if row["score"] == "ahon_ln"]
    assert scored["tokens_scored"] == int(masked["tokens"])
    assert scored["nats_per_token"] == pytest.approx(float(masked["nats"]) / int(masked["tokens"]), rel=1e-5)


def test_heads_that_gates_closed_beside_the_lowest(
    command_line: CommandLine, dense_run: RunFolder, runs: Runs, uneven_gates: list[list[int]], tmp_path: Path
) -> None:
    pruned = runs.run(runs.pruning("pruned", dense_run.last))
    words = (f"checkpoint={dense_run.last}", f"pruned={pruned.last}", *TINY, "score=ahon_ln", "share=0.25")
    done(command_line("study", *words))
    folder = tmp_path / "head_study"
    assert (folder / "curves_perplexity.png").stat().st_size > 1000
    assert (folder / "score_ahon_ln.svg").is_file()
    found = {row["layer"]: row for row in rows(folder, "closed_by_gates.csv")}
    assert [found[layer]["closed"] for layer in ("", "0", "1")] == ["4", "1", "3"]
    assert [float(found[layer]["by_chance"]) for layer in ("", "0", "1")] == [2.0, 0.25, 2.25]
    assert all(0 <= int(row["shared"]) <= int(row["closed"]) for row in found.values())


REFUSED: dict[str, tuple[str, ...]] = {
    "share=1.0": ("share=0.1,1",),
    "did you mean ahon_ln": ("score=ahonln",),
    "score=gradient is one number for a text": ("score=gradient", "mask=dynamic"),
    "score=awft is about the first token": ("score=awft",),
    "are both test": ("calibration.split=test",),
    "score=all,ahon": ("score=all,ahon",),
    "length=0": ("length=0",),
    "calibration.tokens=0": ("calibration.tokens=0",),
    "no such file": ("tasks=absent.yaml",),
}


@pytest.mark.parametrize(("said", "words"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_studied_is_one_line_before_anything_is_loaded(
    command_line: CommandLine, tmp_path: Path, said: str, words: tuple[str, ...]
) -> None:
    ended = command_line("study", "checkpoint=absent.ckpt", *words)
    assert ended.status == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "head_study").exists()


def test_a_layer_that_is_not_there(command_line: CommandLine, dense_run: RunFolder) -> None:
    words = (f"checkpoint={dense_run.last}", *TINY, "output.read=true", "output.layer=2")
    ended = command_line("study", *words)
    assert ended.status == 2
    assert "output.layer=2: has no heads; layers that have: 0, 1" in ended.err


def test_one_text_for_both_is_refused_by_what_it_says(
    command_line: CommandLine, dense_run: RunFolder
) -> None:
    """The same lines as two splits."""
    text = Path("same")
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"wiki.{split}.tokens").write_text("w1 w2 w3 w4\n" * 25)
    data = ("data.source=files", "data.folder=same", "data.cache_folder=cache")
    words = ("study", f"checkpoint={dense_run.last}", *TINY, *data, "score=ahon", "share=0.25")
    ended = command_line(*words)
    assert ended.status == 2
    assert "calibration.same=true" in ended.err
    done(command_line(*words, "calibration.same=true"))
