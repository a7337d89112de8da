import errno
import fcntl
import json
import logging
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allattn.data import corpus, encoded
from allattn.data.config import DataConfig, Source
from allattn.data.corpus import Corpus, prepare
from allattn.errors import InputError
from allattn.files import file_hash
from allattn.training.run_folder import open_run_folder

PREPARE = """
import sys, time
from allattn.data import corpus, encoded
from allattn.data.config import DataConfig, Source
build = corpus._build
def slow(*arguments):
    print("encoded", flush=True)
    time.sleep(0.5)
    build(*arguments)
corpus._build = slow
config = DataConfig(source=Source.files, folder=sys.argv[1], cache_folder=sys.argv[2])
print(corpus.prepare(config, progress=False).splits["train"].ids.tolist())
"""


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were encoded so far."""
    folders: list[Path] = []
    build = corpus._build

    def counting(*arguments) -> None:  # type: ignore[no-untyped-def]
        folders.append(next(each for each in arguments if isinstance(each, Path)))
        build(*arguments)

    monkeypatch.setattr(corpus, "_build", counting)
    return folders


def cached_folder(config: DataConfig) -> Path:
    (meta,) = Path(config.cache_folder).glob("*/meta.json")
    return meta.parent


def ids(result: Corpus) -> dict[str, list[int]]:
    return {split: encoded.ids.tolist() for split, encoded in result.splits.items()}


def test_small_text_in_full(files_config: DataConfig) -> None:
    result = prepare(files_config, progress=False)
    assert result.tokenizer.get_vocab() == {"<eos>": 0, "<unk>": 1, "the": 2, "cat": 3, "dog": 4}
    assert ids(result) == {
        "train": [2, 3, 0, 0, 2, 4, 1, 0, 2, 3, 0],
        "valid": [2, 1, 0],
        "test": [0, 1, 4, 0],
    }
    assert [(split.tokens, split.words) for split in result.splits.values()] == [(11, 11), (3, 3), (4, 4)]
    assert result.vocabulary_size == 5
    train = result.splits["train"].ids
    assert isinstance(train, np.memmap)
    assert train.dtype == np.int32
    assert not train.flags.writeable


def test_wikitext_counts(wikitext_small: Path, tmp_path: Path) -> None:
    config = DataConfig(source=Source.files, folder=str(wikitext_small), cache_folder=str(tmp_path))
    splits = prepare(config, progress=False).splits
    counts = [splits[split].tokens for split in ("train", "valid", "test")]
    assert counts == [180_145, 13_203, 24_298]
    assert sum(counts) == 217_646
    lines = (wikitext_small / "wiki.test.tokens").read_text(encoding="utf-8").split("\n")[:-1]
    assert sum(len(line.split()) + 1 for line in lines) == 24_298
    assert sum(len(line.split()) + 1 for line in lines if line.strip()) == 24_154  # blank lines do count


def test_second_start_does_not_encode_again(files_config: DataConfig, encodings: list[Path]) -> None:
    first = prepare(files_config, progress=False)
    second = prepare(files_config, progress=False)
    assert len(encodings) == 1
    assert ids(first) == ids(second)
    assert first.tokenizer_hash == second.tokenizer_hash
    assert first.fingerprint == second.fingerprint


def test_other_settings_or_text_are_encoded_on_their_own(
    files_config: DataConfig, text_folder: Path, encodings: list[Path]
) -> None:
    first = prepare(files_config, progress=False)
    rarer = prepare(replace(files_config, minimum_count=2), progress=False)
    assert rarer.vocabulary_size == 4  # dog is gone
    assert rarer.fingerprint == first.fingerprint
    assert rarer.tokenizer_hash != first.tokenizer_hash
    (text_folder / "wiki.test.tokens").write_bytes(b"the end of it\n")
    assert prepare(files_config, progress=False).fingerprint != first.fingerprint
    assert len(set(encodings)) == 3


def contents(folder: Path) -> dict[str, bytes]:
    """What the cache holds; `checked` is about these very files."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checked"}


def damage_truncate(folder: Path) -> None:
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-4])


def damage_vocabulary(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"cat":3,"dog":4', '"dog":3,"cat":4'))


def damage_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("{")


def damage_version(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "format": 0}))


def damage_ids(folder: Path) -> None:
    """One wrong id; size and time stay."""
    path = folder / "train.bin"
    before = path.stat()
    path.write_bytes(b"\x03" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damage_missing(folder: Path) -> None:
    (folder / "test.bin").unlink()


def damage_positions(folder: Path) -> None:
    (folder / "test.unseen.bin").write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_ids,
        damage_vocabulary,
        damage_meta,
        damage_version,
        damage_missing,
        damage_positions,
    ],
)
def test_damaged_cache_is_rebuilt_with_a_warning(  # type: ignore[no-untyped-def]
    files_config: DataConfig, encodings: list[Path], caplog: pytest.LogCaptureFixture, damage
) -> None:
    expected = ids(prepare(files_config, progress=False))
    folder = cached_folder(files_config)
    before = contents(folder)
    damage(folder)
    assert contents(folder) != before
    with caplog.at_level(logging.WARNING):
        assert ids(prepare(files_config, progress=False)) == expected
    assert len(encodings) == 2
    (record,) = caplog.records
    assert "encoding the text again" in record.getMessage()
    assert contents(folder) == before


def test_files_are_hashed_when_they_changed_and_not_again(
    files_config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(files_config, progress=False)
    hashed: list[Path] = []
    monkeypatch.setattr(encoded, "file_hash", lambda path: (hashed.append(path), file_hash(path))[1])
    prepare(files_config, progress=False)
    assert hashed == []
    copy = replace(files_config, cache_folder=f"{files_config.cache_folder} copied")
    shutil.copytree(files_config.cache_folder, copy.cache_folder)  # keeps sizes and times
    prepare(copy, progress=False)
    assert {path.name for path in hashed} >= {"train.bin", "valid.bin", "test.bin", "tokenizer.json"}
    hashed.clear()
    prepare(copy, progress=False)
    assert hashed == []


def test_edit_that_keeps_size_and_time_is_noticed(files_config: DataConfig, text_folder: Path) -> None:
    first = prepare(files_config, progress=False)
    path = text_folder / "wiki.valid.tokens"
    before = path.stat()
    path.write_bytes(b"the bork\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert prepare(files_config, progress=False).fingerprint != first.fingerprint


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks(
    files_config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A complete cache opens; what would have to be written is refused with the setting to change."""
    prepare(files_config, progress=False)

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    prepare(files_config, progress=False)
    no_locks = r"its file system has no locks.*set {} to a folder of another file system"
    with pytest.raises(InputError, match=no_locks.format(r"data\.cache_folder")):
        prepare(replace(files_config, minimum_count=2), progress=False)
    with (
        pytest.raises(InputError, match=no_locks.format("runs_folder")),
        open_run_folder(tmp_path / "run", {"seed": 1}, False),
    ):
        pass


def test_no_home_folder(files_config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is not set and the user has no entry: what gives paths works, ~ is refused with its setting."""

    def no_entry(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    prepare(files_config, progress=False)
    changes: list[dict[str, Any]] = [
        {"cache_folder": "~/.cache/allattn"},
        {"folder": "~/text"},
        {"folder": None, "train_file": "a", "valid_file": "b", "test_file": "~/c"},
        {"tokenizer": "~/tokenizer.json"},
    ]
    for change in changes:
        name, value = list(change.items())[-1]
        refused = rf"^data\.{name}={value}: ~ stands for no folder.*a path without ~$"
        with pytest.raises(InputError, match=refused):
            prepare(replace(files_config, **change), progress=False)


def test_failed_encoding_leaves_nothing_behind(files_config: DataConfig, text_folder: Path) -> None:
    (text_folder / "wiki.test.tokens").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=r"wiki\.test\.tokens, line 1"):
        prepare(files_config, progress=False)
    cache = Path(files_config.cache_folder)
    assert not cache.exists() or not any(path.is_file() for path in cache.rglob("*"))


def test_text_that_changes_while_read_is_refused(
    files_config: DataConfig, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = corpus.count_words

    def edit_and_count(chunks):  # type: ignore[no-untyped-def]
        (text_folder / "wiki.valid.tokens").write_bytes(b"edited meanwhile\n")
        return count(chunks)

    monkeypatch.setattr(corpus, "count_words", edit_and_count)
    with pytest.raises(InputError, match="changed while"):
        prepare(files_config, progress=False)
    assert not list(Path(files_config.cache_folder).glob("*/meta.json"))


def test_leftover_of_a_killed_process_is_replaced(files_config: DataConfig, encodings: list[Path]) -> None:
    expected = ids(prepare(files_config, progress=False))
    folder = cached_folder(files_config)
    folder.rename(folder.with_name(f"{folder.name}.77.partial"))
    assert ids(prepare(files_config, progress=False)) == expected
    assert len(encodings) == 2
    assert cached_folder(files_config) == folder
    assert not list(folder.parent.glob("*.partial"))


def test_two_processes_encode_once(text_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARE, str(text_folder), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(lines.count("encoded") for lines in outputs) == 1
    assert outputs[0][-1] == outputs[1][-1] == "[2, 3, 0, 0, 2, 4, 1, 0, 2, 3, 0]"


def test_cache_folder_that_cannot_be_written(files_config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"data\.cache_folder=.*another folder"):
        prepare(replace(files_config, cache_folder=str(tmp_path / "file" / "cache")), progress=False)


def test_subwords_keep_the_word_count(files_config: DataConfig) -> None:
    result = prepare(replace(files_config, tokenizer="bpe", vocabulary_size=258), progress=False)
    train = result.splits["train"]
    assert train.words == 11
    assert train.tokens == len(train.ids) > train.words
    assert (train.ids == result.tokenizer.token_to_id("<eos>")).sum() == 4


def test_tokenizer_of_an_earlier_run_finds_its_text(
    files_config: DataConfig, text_folder: Path, tmp_path: Path, encodings: list[Path]
) -> None:
    first = prepare(files_config, progress=False)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((cached_folder(files_config) / "tokenizer.json").read_bytes())
    with_tokenizer = replace(files_config, tokenizer=str(tokenizer))
    again = prepare(with_tokenizer, progress=False)
    assert len(encodings) == 1
    assert again.tokenizer_hash == first.tokenizer_hash
    assert ids(again) == ids(first)

    (text_folder / "wiki.test.tokens").write_bytes(b"the bird  the\tdog\n")
    other = prepare(with_tokenizer, progress=False)
    assert len(encodings) == 2
    assert other.tokenizer_hash == first.tokenizer_hash
    assert other.splits["test"].ids.tolist() == [2, 1, 1, 0]
    assert other.fingerprint != first.fingerprint


def test_a_tokenizer_finds_only_what_it_encoded(files_config: DataConfig, tmp_path: Path) -> None:
    for minimum_count in (1, 2):
        made = prepare(replace(files_config, minimum_count=minimum_count), progress=False)
        made.tokenizer.save(str(tmp_path / f"{minimum_count}.json"))
    for minimum_count, vocabulary_size in ((1, 5), (2, 4)):
        config = replace(files_config, tokenizer=str(tmp_path / f"{minimum_count}.json"))
        assert prepare(config, progress=False).vocabulary_size == vocabulary_size


def test_unfinished_folder_is_not_found(files_config: DataConfig, tmp_path: Path) -> None:
    first = prepare(files_config, progress=False)
    folder = cached_folder(files_config)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((folder / "tokenizer.json").read_bytes())
    folder.rename(folder.with_name(f"{folder.name}.77.partial"))
    again = prepare(replace(files_config, tokenizer=str(tokenizer)), progress=False)
    assert not str(again.splits["train"].ids.filename).count(".partial")
    assert ids(again) == ids(first)


def test_word_level_tokenizer_file_is_refused_for_raw_text(files_config: DataConfig) -> None:
    prepare(files_config, progress=False)
    tokenizer = str(cached_folder(files_config) / "tokenizer.json")
    config = DataConfig(
        source=Source.wikitext2_raw, tokenizer=tokenizer, cache_folder=files_config.cache_folder
    )
    with pytest.raises(InputError, match=r"word level.*wikitext2_raw"):
        prepare(config, progress=False)


def test_progress_goes_to_standard_error_and_only_if_asked(
    files_config: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(files_config, progress=False)
    assert capsys.readouterr() == ("", "")
    prepare(replace(files_config, minimum_count=2), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "counting words" in shown.err
    assert "encoding test" in shown.err
