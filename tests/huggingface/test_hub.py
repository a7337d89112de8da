"""The hub, by a local stand-in: a model is put up, comes back, and serves as a checkpoint by its name."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_fixtures import CommandLine
from support.hub_stand_in import SHA, TOKEN, Hub, serve
from support.huggingface_fixtures import Exported

from allattn.errors import InputError
from allattn.training.hub_models import hub_folder

PUT_UP = """\
import sys
import allattn.huggingface
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1]).push_to_hub("lab/tiny")
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("lab/tiny")
model = AutoModelForCausalLM.from_pretrained("lab/tiny")
tokenizer = AutoTokenizer.from_pretrained("lab/tiny")
print(tokenizer.decode(model.generate(**tokenizer("w3 w1", return_tensors="pt"), max_new_tokens=6)[0]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty hub."""
    own = Hub()
    with serve(own):
        yield own


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_TOKEN": TOKEN}
    return {**os.environ, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def ended(folder: Path, hub: Hub, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    there = {**environment(hub, folder), **variables}
    return subprocess.run([sys.executable, *words], cwd=folder, env=there, capture_output=True, text=True)


def test_a_model_goes_to_the_hub_and_back(
    hub: Hub, exported_kind: Callable[[str], Exported], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason='needs the extra: pip install "allattn[hf]"')
    place = exported_kind("cut, a layer without heads").folder
    put_up = ended(tmp_path, hub, "-c", PUT_UP, str(place))
    assert put_up.returncode == 0, put_up.stderr
    assert hub.unanswered == []
    assert hub.files["lab/tiny"]["model.safetensors"]
    assert hub.files["lab/tiny"]["tokenizer.json"] == (place / "tokenizer.json").read_bytes()
    hub.files["lab/tiny"]["evil.py"] = b"raise SystemExit\n"
    for reference in ("huggingface:lab/tiny", f"huggingface:lab/tiny@{SHA}"):
        words = ["-m", "allattn", "generate", f"checkpoint={reference}", "prompt=w3 w1", "length=6"]
        written = ended(tmp_path, hub, *words, "temperature=0", "device=cpu")
        assert written.returncode == 0, written.stderr
        text = written.stdout.replace("\n", " <eos> ").removesuffix(" <eos> ")
        assert text.split() == put_up.stdout.split()
    heads = ended(
        tmp_path, hub, "-m", "allattn", "heads", "checkpoint=huggingface:lab/tiny", HF_HUB_OFFLINE="1"
    )
    assert heads.returncode == 0, heads.stderr  # offline, from the cache
    assert "7 of 24" in heads.stdout
    assert not list((tmp_path / "hf").rglob("evil.py"))


LOCAL_TASK = """\
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: data.json}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
EVERY_COMMAND = """\
import sys
from allattn.commands.command_line import main
model, device = "checkpoint=huggingface:lab/tiny", ["device=cpu", "progress=false"]
text = ["data.source=files", "data.folder=text", "data.cache_folder=cache"]
for words in (
    ["evaluate", model, *text, "split=test"],
    ["evaluate", "export", "huggingface:lab/tiny", *text],
    ["heads", model],
    ["generate", model, "prompt=w3 w1", "length=6", "temperature=0"],
    ["lm-eval", model, "tasks=task.yaml", "file=found.json"],
):
    sys.argv = ["allattn", *words, *device]
    print("==", *words[:1], flush=True)
    main()
"""


def test_every_command_on_a_model_of_the_hub(
    hub: Hub, exported_kind: Callable[[str], Exported], tmp_path: Path
) -> None:
    """By the hub's answers, then offline from the cache; the same as from a folder."""
    pytest.importorskip("lm_eval", reason='needs the extra: pip install "allattn[lm-eval]"')
    place = exported_kind("cut, a layer without heads").folder
    hub.files["lab/tiny"] = {file.name: file.read_bytes() for file in place.iterdir()}
    (tmp_path / "export").symlink_to(place)
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"wiki.{split}.tokens").write_text("w1 w2 w3\nw5 w1 w4 w40\n" * 20)
    (tmp_path / "data.json").write_text('{"text": "w1 w2 w3"}')
    (tmp_path / "task.yaml").write_text(LOCAL_TASK)
    online = ended(tmp_path, hub, "-c", EVERY_COMMAND)
    assert online.returncode == 0, online.stderr
    evaluated, compared, heads, generated, found = online.stdout.split("== ")[1:]
    assert "perplexity per word" in evaluated
    assert compared.count(evaluated.partition("\n")[2].splitlines()[0]) == 2, "as from the folder"
    assert "7 of 24" in heads
    assert generated
    assert "local: word_perplexity " in found
    offline = ended(tmp_path, hub, "-c", EVERY_COMMAND, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == online.stdout


def test_what_the_hub_does_not_give_is_one_line(hub: Hub, tmp_path: Path) -> None:
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = ended(tmp_path, hub, "-m", "allattn", "heads", "checkpoint=huggingface:lab/none", **variables)
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: huggingface:lab/none: the hub does not give it and the cache lacks it")
        assert line.endswith("give the folder of an export")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x/y", ""])
def test_a_name_has_two_parts(name: str, command_line: CommandLine) -> None:
    with pytest.raises(InputError, match="whose form is ORG/NAME"):
        hub_folder(name)
    done = command_line("heads", f"checkpoint=huggingface:{name}")
    assert (done.status, done.err.count("\n")) == (2, 1)
