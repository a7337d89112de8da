"""lm-evaluation-harness on local tasks: perplexity as `allattn evaluate` has it, accuracy by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.command_fixtures import CommandLine
from support.foreign_folders import word_tokens
from support.foreign_models import tiny

import allattn
from allattn.data.vocabulary import load_tokenizer
from allattn.heads.masks import DynamicMask, HeadMask, StaticMask
from allattn.heads.watched import Batch
from allattn.huggingface.foreign import ForeignModel
from allattn.huggingface.opening import Foreign
from allattn.training.run_folder import RunFolder

pytest.importorskip("lm_eval", reason='needs the extra: pip install "allattn[lm-eval]"')

from allattn.huggingface.harness import as_foreign_harness_model, foreign_batch_size
from allattn.huggingface.tasks import numbers_by_task, run_tasks

LINES = ["w1 w2 w3 w4", "w5 w1 w1", "w2 w9 w0 w7 w7 w3"]
QUESTIONS = [
    {"question": "w1 w2", "choices": ["w3", "w4 w5", "w0"], "answer": 0},
    {"question": "w7", "choices": ["w1 w1", "w2", "w8"], "answer": 1},
    {"question": "w0 w0 w5", "choices": ["w6", "w1", "w2 w2"], "answer": 2},
    {"question": "w3", "choices": ["w1", "w4", "w20"], "answer": 0},
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A text to score whole and questions with choices, as YAML files with their data beside them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = " <eos> ".join(LINES) + " <eos>"  # written out, a line's end is a word for the harness too
    rows = {"text": [{"text": text}], "choice": QUESTIONS}
    about: dict[str, dict[str, Any]] = {
        "text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
    }
    files = {}
    for name, values in about.items():
        data = tmp_path / f"{name}.json"
        data.write_text("\n".join(json.dumps(row) for row in rows[name]))
        files[name] = tmp_path / f"{name}.yaml"
        dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        task = {"task": f"local_{name}", "test_split": "test", "num_fewshot": 0, **dataset, **values}
        files[name].write_text(yaml.safe_dump(task))
    return files


@pytest.fixture
def exported(command_line: CommandLine, dense_run: RunFolder, tmp_path: Path) -> Path:
    """An export of the dense run."""
    done = command_line("export", f"checkpoint={dense_run.last}", "folder=exported", "progress=false")
    assert done.status == 0, done.err
    return tmp_path / "exported"


def test_word_perplexity_is_that_of_evaluate_with_memory(
    command_line: CommandLine, dense_run: RunFolder, tasks: dict[str, Path], tmp_path: Path
) -> None:
    """Mode memory: each word sees the M before it in every layer.

    The harness puts `<eos>` before the text, as a blank first line does, which `evaluate` does not score.
    """
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text("\n" + "\n".join(LINES) + "\n")
    text = ["data.source=files", f"data.folder={tmp_path}", f"data.cache_folder={tmp_path}/cache"]
    device = ["device=cpu", "progress=false"]
    own = command_line("evaluate", f"checkpoint={dense_run.last}", *text, *device, "eval.rows=1")
    expected = float(own.out.split("perplexity per word ")[1].split(",")[0])
    done = command_line(
        "lm-eval", f"checkpoint={dense_run.last}", f"tasks={tasks['text']}", "file=found.json", *device
    )
    assert done.status == 0, done.err
    record = json.loads((tmp_path / "found.json").read_text())
    found = record["tasks"]["local_text"]["word_perplexity"]
    assert found == pytest.approx(expected, rel=1e-4)  # evaluate prints four places
    words = sum(len(line.split()) + 1 for line in LINES)
    bytes_ = len((" <eos> ".join(LINES) + " <eos>").encode())
    by_byte = record["tasks"]["local_text"]["byte_perplexity"]
    assert by_byte == pytest.approx(math.exp(math.log(found) * words / bytes_), rel=1e-6)


def by_hand(folder: Path) -> float:
    """Share of the questions whose answer is the likeliest choice."""
    model, tokenizer = allattn.load(folder), load_tokenizer(folder / "tokenizer.json")
    right = 0
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            start = tokenizer.encode(str(question["question"])).ids
            ids = torch.tensor([start + tokenizer.encode(choice).ids])
            with torch.no_grad():
                log_probs, _ = model.log_probs(ids, model.empty_memory(1))
            scores.append(float(log_probs[0, :-1].gather(1, ids[0, 1:, None])[len(start) - 1 :].sum()))
        right += scores.index(max(scores)) == question["answer"]
    return right / len(QUESTIONS)


def test_accuracy_is_that_by_hand(
    command_line: CommandLine, exported: Path, tasks: dict[str, Path], tmp_path: Path
) -> None:
    """By our command and, in a process of its own, by the harness's."""
    both = f"tasks={tasks['choice']},{tasks['text']}"
    done = command_line("lm-eval", f"checkpoint={exported}", both, "file=found.json", "device=cpu")
    assert done.status == 0, done.err
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["tasks"]["local_choice"]["acc"] == by_hand(exported)
    assert record["documents"] == {"local_choice": 4, "local_text": 1}
    assert "local_choice: acc " in done.out
    harness = [sys.executable, "-m", "allattn.huggingface.harness", "--model", "hf", "--device", "cpu"]
    harness += ["--model_args", f"pretrained={exported}", "--tasks", str(tasks["choice"])]
    ended = subprocess.run([*harness, "--output_path", "out"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["results"]["local_choice"]["acc,none"] == by_hand(exported)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=none.yaml", "file=f.json"], "none.yaml: there is no such file"),
        (["tasks=no_such_task", "file=f.json"], "lm-evaluation-harness cannot run them"),
        (["tasks=no_such_task"], "is not the last checkpoint of a finished run: give file="),
        (["tasks=no_such_task", "batch_size=0"], "batch_size=0: must be at least 1"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    command_line: CommandLine, exported: Path, words: list[str], message: str
) -> None:
    done = command_line("lm-eval", f"checkpoint={exported}", "device=cpu", *words)
    assert done.status == 2
    assert message in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_accuracy_of_a_masked_model_of_others(dynamic: bool, tasks: dict[str, Path], tmp_path: Path) -> None:
    """The answer of each question that the model gives under the mask, one question and choice at a time."""
    tokens = word_tokens(starts=True)
    foreign = Foreign(tmp_path, ForeignModel(tiny("llama")), tokens)
    model = foreign.model

    def mask() -> HeadMask:
        if dynamic:
            return DynamicMask(model.layers, "ahon_ln", tau=0.9)
        return StaticMask([torch.tensor([0.0, 1, 0, 1, 1, 0])] * 3)

    watching = mask()
    lm = as_foreign_harness_model(foreign, foreign_batch_size(watching, 8), 2048)
    with model.watch(watching):
        found = numbers_by_task(run_tasks(lm, [str(tasks["choice"])], None, None, 1, 10))
    right = 0
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            start = tokens(str(question["question"])).input_ids
            ids = torch.tensor(start + tokens(choice, add_special_tokens=False).input_ids)
            # the harness reads all but the last token
            batch = Batch(ids[None, :-1], ids[None, 1:], torch.ones(1, len(ids) - 1, dtype=torch.bool))
            with torch.no_grad(), model.watch(mask()):
                scores.append(-float(model.nats(batch)[0][0, len(start) - 1 :].sum()))
        right += scores.index(max(scores)) == question["answer"]
    assert found["local_choice"]["acc"] == right / len(QUESTIONS)
    assert 0 < watching.share < 1
