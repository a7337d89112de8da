"""A study of a tiny Llama from its folder, with a task through the masks."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from support.command_fixtures import CommandLine
from support.foreign_folders import saved, word_tokens
from support.foreign_models import tiny

from allattn.data.config import DataConfig
from allattn.data.segments import evaluation_rows
from allattn.head_study import report
from allattn.head_study.record import RECORD

LENGTH, TEST = 10, 45


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions with two choices."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = [{"question": f"w{i} w{i + 1}", "choices": ["w3", "w5"], "answer": i % 2} for i in range(6)]
    (tmp_path / "asked.json").write_text("\n".join(map(json.dumps, asked)))
    task = {
        "task": "asked",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "asked.json")}},
        "test_split": "test",
        "num_fewshot": 0,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(task))
    return tmp_path / "asked.yaml"


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def test_a_llama_is_studied_killed_and_resumed(
    command_line: CommandLine, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "draw_pictures", lambda result: {})  # which take most of the time
    model = tiny("llama")
    folder = saved(model, tmp_path / "llama")
    words = [f"checkpoint=huggingface:{folder}", "score=awft_ln,ahon_ln", "share=0.2"]
    words += ["data.source=files", f"data.folder={data.folder}", "calibration.tokens=120", f"length={LENGTH}"]
    words += [f"test.tokens={TEST}", "rows=3", "random_seeds=1", "mask=static,dynamic", "progress=false"]
    done = command_line("study", *words, "folder=whole")
    assert done.status == 0, done.err
    whole = (tmp_path / "whole" / RECORD).read_text().splitlines()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / RECORD).write_text("\n".join([*whole[:5], whole[5][:30]]))
    assert command_line("study", *words, "folder=cut").status == 0
    assert (tmp_path / "cut" / RECORD).read_text().splitlines() == whole

    found = rows(tmp_path / "whole", "points.csv")
    assert [row["score"] for row in found] == ["", *["awft_ln", "ahon_ln", "random"] * 2]
    # 4 of 18 heads, the columns of whose projections are zeroed by hand
    lowest = sorted(rows(tmp_path / "whole", "heads.csv"), key=lambda row: float(row["ahon_ln"]))[:4]
    with torch.no_grad():
        for row in lowest:
            first = 4 * int(row["head"])
            projection = model.model.layers[int(row["layer"])].self_attn.o_proj
            projection.weight[:, first : first + 4] = 0
    text = (Path(str(data.folder)) / "wiki.test.tokens").read_text()
    ids = torch.tensor(word_tokens()(text)["input_ids"])[: TEST + 1]
    nats = 0.0
    for window in evaluation_rows(TEST + 1, -(-TEST // LENGTH), 0):
        inputs, targets = ids[window.first - 1 : window.end - 1], ids[window.first : window.end]
        with torch.no_grad():
            log_probs = model(inputs[None]).logits[0].log_softmax(-1)
        nats -= float(log_probs.gather(1, targets[:, None]).sum())
    assert float(found[2]["nats"]) == pytest.approx(nats, rel=1e-5)


def test_a_task_through_a_mask(
    command_line: CommandLine,
    data: DataConfig,
    choices: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its accuracy is measured at every point; that it is the masked model's, tests of the harness say."""
    monkeypatch.setattr(report, "draw_pictures", lambda result: {})
    folder = saved(tiny("llama"), tmp_path / "llama")
    words = [f"checkpoint=huggingface:{folder}", "data.source=files", f"data.folder={data.folder}"]
    words += ["calibration.tokens=60", "test.tokens=20", "length=10", "score=ahon_ln", "share=0.2"]
    words += ["mask=dynamic", "random_seeds=1", f"tasks={choices}", "progress=false"]
    done = command_line("study", *words)
    assert done.status == 0, done.err
    found = rows(tmp_path / "head_study", "points.csv")
    assert {6 * float(row["asked acc"]) for row in found} <= set(range(7))
    assert "asked acc, dynamic mask" in (tmp_path / "head_study" / "table.md").read_text()


REFUSED = {
    "a model of others does not say on what text": ["length=16"],
    "have no memory between sequences": ["memory=true", "data.source=pydoc"],
    "length=100": ["length=100", "data.source=pydoc"],
    "goes with our checkpoints": ["pruned=other.ckpt", "data.source=pydoc"],
    "projection=no.such": ["projection=no.such", "length=16", "data.source=pydoc"],
}


@pytest.mark.parametrize(("said", "words"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_go_with_a_model_of_others(
    command_line: CommandLine, tmp_path: Path, said: str, words: list[str]
) -> None:
    folder = saved(tiny("llama"), tmp_path / "llama")
    ended = command_line("study", f"checkpoint=huggingface:{folder}", "progress=false", *words)
    assert ended.status == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
