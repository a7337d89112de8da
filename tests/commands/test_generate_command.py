"""The command: prompts, settings and what it prints, for checkpoints and exports, dense and cut."""

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.command_fixtures import CommandLine
from support.exports import save_export
from support.reference import assert_close, rounding
from tokenizers import Tokenizer, normalizers

from allattn.commands import generate as command
from allattn.commands.generate import GenerateSettings, check_settings, generate, literal_prompt, prompt_ids
from allattn.data.vocabulary import save_tokenizer, tokenizer_hash, train_bpe, word_tokenizer
from allattn.errors import InputError
from allattn.model.language_model import AllAttentionLM
from allattn.training.checkpoints import FORMAT_VERSION, write_checkpoint

Models = Callable[..., AllAttentionLM]

WORDS = word_tokenizer(Counter({f"w{i}".encode(): 100 - i for i in range(48)}))  # 50 entries, w0 is 2
BPE = train_bpe(["日本語 é naïve 😀 abc\n".encode() * 3], 280)
CUT = {
    "heads_kept": [[0, 2, 3, 5], [], [0, 6, 7]],
    "output_scale": [2.0, 8.0, 4.0],
}  # powers of 2: exact inside WO too


def saved_checkpoint(model: AllAttentionLM, tokenizer: Tokenizer, folder: Path) -> Path:
    """last.ckpt of this model with its tokenizer.json beside it."""
    entry: dict[str, Any] = {"format_version": FORMAT_VERSION, "model": model.config.to_dict()}
    entry |= {"phase": "fine_tune", "step": 7, "best": 1.0, "memory": [], "data": {}, "fingerprint": ""}
    entry |= {"output_scaling": None, "target_sparsity": None, "tokenizer_hash": tokenizer_hash(tokenizer)}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    write_checkpoint(folder / "last.ckpt", {"state_dict": state, "allattn": entry})
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    return folder / "last.ckpt"


@pytest.fixture(scope="module")
def model(random_model: Models) -> AllAttentionLM:
    """A cut model with a layer without heads; its words have probabilities that differ but leave a choice."""
    model = random_model(**CUT, seed=2)
    with torch.no_grad():
        for table in model.embedding.tables:
            table *= 0.05
    return model


@pytest.fixture(scope="module")
def checkpoint(model: AllAttentionLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_checkpoint(model, WORDS, tmp_path_factory.mktemp("words"))


def settings(checkpoint: Path, **changes: Any) -> GenerateSettings:
    return GenerateSettings(checkpoint=str(checkpoint), **{"length": 20, **changes})


# --- what is generated


@pytest.mark.numeric
def test_greedy_text_is_the_likeliest_word_of_the_full_forward_pass(
    model: AllAttentionLM, checkpoint: Path
) -> None:
    """By one forward pass over the text: no cache, no command. Its sums are others, so they may round."""
    found = generate(settings(checkpoint, temperature=0.0, length=25))
    words = [0 if word == "\n" else WORDS.token_to_id(word) for word in re.findall(r"\n|\S+", found)]
    assert len(words) == 25
    with torch.no_grad():
        log_probs, _ = model.log_probs(torch.tensor([[0, *words[:-1]]]), model.empty_memory(1))
    chosen = log_probs[0, range(25), words]
    assert_close(chosen, log_probs[0].max(-1).values, rounding(torch.float32, 2 * 3 * 32))
    assert len(set(words)) > 3


def test_equal_seeds_write_equal_texts(checkpoint: Path) -> None:
    first = generate(settings(checkpoint, prompt="w3 w4"))
    assert first.startswith("w3 w4 ")
    assert generate(settings(checkpoint, prompt="w3 w4")) == first
    assert generate(settings(checkpoint, prompt="w3 w4", seed=2)) != first


def test_a_longer_text_begins_like_a_shorter_one(checkpoint: Path) -> None:
    assert generate(settings(checkpoint, length=40)).startswith(generate(settings(checkpoint, length=20)))


@pytest.mark.numeric
@pytest.mark.parametrize("dense", [True, False])
def test_an_export_writes_what_its_checkpoint_writes(
    random_model: Models, model: AllAttentionLM, tmp_path: Path, dense: bool
) -> None:
    """s_g explicit or inside WO."""
    path = saved_checkpoint(random_model() if dense else model, WORDS, tmp_path)
    save_export(path, tmp_path / "export")
    for changes in ({"temperature": 0.0}, {"prompt": "w1 w2", "top_k": 10, "top_p": 0.9}):
        assert generate(settings(tmp_path / "export", **changes)) == generate(settings(path, **changes))


def test_memory_length_changes_what_is_seen(checkpoint: Path) -> None:
    def text(memory_length: int | None) -> str:
        return generate(settings(checkpoint, prompt="w1 w2 w3", length=40, memory_length=memory_length))

    assert text(7) == text(None)
    assert text(1) != text(None)


def test_subwords_are_written_as_text(
    random_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any bytes come out as whole characters; the prompt too."""
    path = saved_checkpoint(random_model(vocabulary_size=BPE.get_vocab_size()), BPE, tmp_path)
    text = generate(settings(path, prompt="日本 😀é", length=60, temperature=2.0))
    assert text.startswith("日本 😀é")
    assert capsys.readouterr().out == text + "\n"


def test_words_are_printed_as_they_come(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the next word is asked for, the one before is out."""
    printed: list[str] = []

    def words(*_: object) -> Iterator[int]:
        for word in (2, 3, 0, 4):
            printed.append(capsys.readouterr().out)
            yield word

    monkeypatch.setattr(command, "generate_tokens", words)
    assert generate(settings(checkpoint, prompt="w9")) == "w9 w0 w1\nw2"
    assert printed == ["w9", " w0", " w1", "\n"]
    assert capsys.readouterr().out == "w2\n"


# --- the prompt


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("", [0]),
        ("w0  w1", [2, 3]),
        ("w0\nw1", [2, 0, 3]),
        ("\n", [0]),
        ("w0\n", [2, 0]),
        ("<unk> <eos> w0", [1, 0, 2]),
    ],
)
def test_word_prompts(prompt: str, ids: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert prompt_ids(prompt, WORDS) == ids
    assert capsys.readouterr().err == ""


def test_unknown_words_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert prompt_ids("w0 dog <unk> cat w1", WORDS) == [2, 1, 1, 1, 3]
    captured = capsys.readouterr()
    assert captured.err == "2 of the prompt's words are not in the vocabulary: read as <unk>\n"
    assert captured.out == ""


def test_subword_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt_ids(" é\nabc xyz", BPE)
    assert BPE.decode(ids, skip_special_tokens=False) == " é<eos>abc xyz"
    assert prompt_ids("", BPE) == [BPE.token_to_id("<eos>")]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("prompt", [" ", "   "])
def test_a_prompt_without_tokens_is_refused(prompt: str) -> None:
    with pytest.raises(InputError, match=r"prompt.*no token"):
        prompt_ids(prompt, WORDS)


def test_a_subword_prompt_without_tokens_is_refused() -> None:
    """A tokenizer that strips what it is given."""
    stripping = Tokenizer.from_str(BPE.to_str())
    stripping.normalizer = normalizers.Strip()
    with pytest.raises(InputError, match=r"prompt.*no token"):
        prompt_ids("  ", stripping)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InputError, match="UTF-8"):
        prompt_ids("a\udcff", WORDS)


@given(st.text(st.sampled_from("ab\\\"'${}=, \n:[]()#~+@%\té日") | st.characters(exclude_categories=["Cs"])))
def test_no_character_of_a_prompt_means_anything_to_hydra(prompt: str) -> None:
    quoted, other = literal_prompt([f"prompt={prompt}", "length=3"])
    value = OverridesParser.create().parse_override(quoted).value()
    assert OmegaConf.to_container(OmegaConf.create({"prompt": value}), resolve=True) == {"prompt": prompt}
    assert other == "length=3"


# --- settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length", 0),
        ("memory_length", 0),
        ("seed", -1),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_settings_are_refused_before_anything_is_read(name: str, value: float) -> None:
    wrong = replace(settings(Path("nowhere")), **{name: value})  # type: ignore[arg-type]
    for refuse in (check_settings, generate):
        with pytest.raises(InputError, match=f"^{name}={value}: "):
            refuse(wrong)


def test_a_memory_beyond_the_position_table_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"position_rows=32"):
        generate(settings(checkpoint, memory_length=32))


def test_an_artifact_is_accepted_in_the_place_of_a_path() -> None:
    with pytest.raises(InputError, match="wandb:ENTITY/PROJECT/NAME:ALIAS"):
        generate(GenerateSettings(checkpoint="wandb:lab/dense"))


def test_another_vocabulary_is_refused(model: AllAttentionLM, tmp_path: Path) -> None:
    path = saved_checkpoint(model, WORDS, tmp_path)
    other = word_tokenizer(Counter({f"v{i}".encode(): 100 - i for i in range(48)}))
    save_tokenizer(other, tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="another hash"):
        generate(settings(path))


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (
            ['prompt=w1, "w2" = ${x} w3', "length=1", "top_k=1"],
            0,
            "<unk> <unk> <unk> <unk> w3",
            "4 of the prompt's words",
        ),
        (["top_p=2"], 2, "", "error: top_p=2.0: must lie in (0, 1]"),
    ],
)
def test_at_the_command_line(
    checkpoint: Path, arguments: list[str], status: int, out: str, err: str, command_line: CommandLine
) -> None:
    """A prompt with what Hydra would take for its own; one line on standard error either way."""
    before = signal.getsignal(signal.SIGPIPE)
    try:
        done = command_line("generate", f"checkpoint={checkpoint}", *arguments)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert done.status == status, done.err
    assert done.out.startswith(out)
    (only,) = done.err.strip().splitlines()
    assert only.startswith(err)
