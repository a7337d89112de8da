"""Texts as they come: the right count, computed here by itself, or one line that says what is wrong where."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allattn.data import corpus
from allattn.data.config import DataConfig, Source
from allattn.data.corpus import Corpus, prepare
from allattn.errors import InputError

PLAIN = "a b c a\n\n b a \n"
LONG = "word " * 300_000  # 1.5 MB without a line end


def by_hand(text: str) -> int:
    """Words of all lines by Python's own means, and one <eos> a line."""
    lines = text.replace("\r\n", "\n").removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    return sum(len([word for word in line.split(" ") if word]) for line in lines) + len(lines)


Write = Callable[..., DataConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write three splits, PLAIN where none is given; the settings that read them."""

    def splits(**texts: str | bytes) -> DataConfig:
        folder = tmp_path / "text"
        folder.mkdir(exist_ok=True)
        for split in ("train", "valid", "test"):
            text = texts.get(split, PLAIN)
            content = text.encode() if isinstance(text, str) else text
            (folder / f"wiki.{split}.tokens").write_bytes(content)
        return DataConfig(source=Source.files, folder=str(folder), cache_folder=str(tmp_path / "cache"))

    return splits


def counts(result: Corpus) -> list[int]:
    for encoded in result.splits.values():
        assert len(encoded.ids) == encoded.tokens == encoded.words
    return [encoded.tokens for encoded in result.splits.values()]


TEXTS = {
    "one line only": "a b c\n",
    "no newline at the end": "a b\nc d",
    "one word": "a",
    "CRLF": "a b\r\n\r\nc\r\n",
    "BOM": "\ufeffa b\nc\n",
    "BOM and CRLF, no end": "\ufeffa b\r\nc",
    "blank lines": "\n\n\n",
    "spaces only": "   \n  \n",
    "U+2028 inside a line": "a\u2028b c\n",
    "other line ends of Unicode": "a\u0085b\u000bc\u000cd\u001ce\u2029f g\n",
    "tabs and no-break spaces stay in a word": "a\tb\u00a0c d\n",
    "a very long line": LONG,
    "a very long word": "x" * 2_000_000 + " y\n",
}


@pytest.mark.parametrize("split", ["train", "test"])
def test_counts_are_those_by_hand(write: Write, split: str) -> None:
    for name, text in TEXTS.items():
        expected = [by_hand(text if each == split else PLAIN) for each in ("train", "valid", "test")]
        assert counts(prepare(write(**{split: text}), progress=False)) == expected, name


@given(
    lines=st.lists(st.text(alphabet="ab \t\u2028\u00e9\ud7ff\U0001f600\r\u0085", max_size=12), max_size=6),
    end=st.sampled_from(["", "\n", "\r\n"]),
    mark=st.booleans(),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_text_is_counted_or_refused(write: Write, lines: list[str], end: str, mark: bool) -> None:
    text = ("\ufeff" if mark else "") + "\n".join(lines) + end
    config = write(valid=text)
    if not text.removeprefix("\ufeff"):
        with pytest.raises(InputError, match=r"wiki\.valid\.tokens: is empty"):
            prepare(config, progress=False)
    else:
        assert counts(prepare(config, progress=False))[1] == by_hand(text)


REFUSED: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["there is no such file", "data.folder"]),
    "empty": (b"", ["is empty"]),
    "BOM only": (b"\xef\xbb\xbf", ["is empty"]),
    "invalid UTF-8": (b"ok\nbad \xe9 word\n", ["line 2", "byte offset 7", "0xe9", "UTF-8"]),
    "invalid after a long line": (LONG.encode() + b"\n\xff", ["line 2", "byte offset 1500001", "0xff"]),
    "cut inside a letter": ("ok\nend \u00e9".encode()[:-1], ["line 2", "byte offset 7", "0xc3"]),
    "NUL": (b"a\0b\n", ["line 1", "byte offset 1", "NUL"]),
    "binary": (bytes(range(256)), ["line 1", "byte offset 0", "NUL"]),
    "UTF-16": ("a b\n".encode("utf-16"), ["UTF-16"]),
}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_refused_with_the_place(write: Write, split: str) -> None:
    for name, (content, named) in REFUSED.items():
        config = write(**{split: content or b""})
        path = Path(str(config.folder)) / f"wiki.{split}.tokens"
        if content is None:
            path.unlink()
        with pytest.raises(InputError) as refusal:
            prepare(config, progress=False)
        message = str(refusal.value)
        assert all(part in message for part in [str(path), *named]), (name, message)
        assert "\n" not in message, name
        assert not list(Path(config.cache_folder).glob("*/*.bin")), f"{name}: nothing of it is kept"


def test_folder_in_the_place_of_a_file(write: Write) -> None:
    config = write()
    path = Path(str(config.folder)) / "wiki.valid.tokens"
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"wiki\.valid\.tokens"):
        prepare(config, progress=False)


def test_unseen_words_are_unk_although_the_text_has_none(write: Write) -> None:
    """The training text lacks <unk>; valid has two unseen words and test asks for <unk> itself."""
    config = write(train="a b a\n", valid="a new b newer\n", test="<unk> a <unk>\n")
    result = prepare(config, progress=False)
    ids = {word: result.tokenizer.token_to_id(word) for word in ("a", "b", "<unk>", "<eos>")}
    assert sorted(ids.values()) == list(range(4)), "four entries, no word of valid or test among them"
    words = {
        split: [{v: k for k, v in ids.items()}[i] for i in encoded.ids]
        for split, encoded in result.splits.items()
    }
    assert words["valid"] == ["a", "<unk>", "b", "<unk>", "<eos>"]
    assert words["test"] == ["<unk>", "a", "<unk>", "<eos>"]


def test_two_texts_with_damaged_memories_of_their_keys(write: Write, tmp_path: Path) -> None:
    """The remembered hashes of two texts are emptied; neither opens the other's ids."""
    first = write()
    second = replace(first, folder=str(tmp_path / "second"))
    Path(str(second.folder)).mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "second" / f"wiki.{split}.tokens").write_text("x y z\n")
    expected = [counts(prepare(config, progress=False)) for config in (first, second)]
    assert expected[0] != expected[1]
    for path in (Path(first.cache_folder) / "fingerprints").iterdir():
        path.write_text("")
    assert [counts(prepare(config, progress=False)) for config in (first, second)] == expected


SLOW = """
import sys, time
from allattn.data import corpus
from allattn.data.config import DataConfig, Source
finish = corpus.finish_folder
def slow(*arguments):
    print("half", flush=True)
    time.sleep(float(sys.argv[3]))
    finish(*arguments)
corpus.finish_folder = slow
config = DataConfig(source=Source.files, folder=sys.argv[1], cache_folder=sys.argv[2])
print(sum(e.tokens for e in corpus.prepare(config, progress=False).splits.values()))
"""


@pytest.mark.parametrize("killed", [False, True], ids=["it goes on", "it is killed"])
def test_while_another_process_writes_the_cache(write: Write, killed: bool) -> None:
    """All ids are on disk but the folder is not whole: wait for it, or do it again where its writer died."""
    config = write()
    command = [sys.executable, "-c", SLOW, str(config.folder), config.cache_folder, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        assert list(Path(config.cache_folder).glob("*.partial/train.bin"))
        assert not list(Path(config.cache_folder).glob("*/meta.json"))
        if killed:
            os.kill(writer.pid, signal.SIGKILL)
        built: list[str] = []
        build = corpus._build
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "_build", lambda *a: (built.append("built"), build(*a)))
            result = prepare(config, progress=False)
        assert counts(result) == [by_hand(PLAIN)] * 3
        assert built == (["built"] if killed else [])
        if not killed:
            assert writer.wait(30) == 0
            assert writer.stdout.read() == f"{3 * by_hand(PLAIN)}\n"
    assert not list(Path(config.cache_folder).glob("*.partial"))
