import subprocess
import sys
from pathlib import Path

import pytest

from allattn.data.config import DataConfig, Source
from allattn.data.text_files import FilesSource, read_lines, split_paths
from allattn.errors import InputError


def read(path: Path, content: bytes, chunk_bytes: int = 2**20) -> list[bytes]:
    path.write_bytes(content)
    return list(read_lines(path, chunk_bytes))


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1000])
def test_lines(tmp_path: Path, chunk_bytes: int) -> None:
    for content, expected in (
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb", b"a\nb\n"),
        (b"a\r\n\r\nb\r\n", b"a\n\nb\n"),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", b"a\n\xef\xbb\xbfb\n"),  # only a leading mark is dropped
        (b"\n\n", b"\n\n"),
        (b"one line", b"one line\n"),
        (b"a\rb\n", b"a\rb\n"),
        (b"a\r", b"a\r\n"),  # a lone carriage return belongs to its line
        ("a\u2028b\u0085c\x0bd\x0ce\u00a0f\n".encode(), "a\u2028b\u0085c\x0bd\x0ce\u00a0f\n".encode()),
    ):
        chunks = read(tmp_path / "text", content, chunk_bytes)
        assert all(chunk.endswith(b"\n") for chunk in chunks), content
        assert b"".join(chunks) == expected, content


def test_reads_in_pieces_cut_at_lines_and_keeps_long_lines_whole(tmp_path: Path) -> None:
    lines = [b"x" * 1000 + b"\n", b"short\n", "\u00e9".encode() * 500 + b"\n", b"end\n"]
    chunks = read(tmp_path / "text", b"".join(lines), chunk_bytes=64)
    assert len(chunks) > 1
    assert b"".join(chunks) == b"".join(lines)
    assert [line for chunk in chunks for line in chunk.splitlines(keepends=True)] == lines


@pytest.mark.parametrize("chunk_bytes", [4, 1000])
def test_refuses_bad_content(tmp_path: Path, chunk_bytes: int) -> None:
    contents = [
        (b"", ["empty"]),
        (b"\xef\xbb\xbf", ["empty"]),
        (b"ok\nbad \xff word\n", ["line 2", "byte offset 7", "0xff", "UTF-8"]),
        (b"ok\nok\ncut \xc3", ["line 3", "byte offset 10", "0xc3"]),
        (b"\xef\xbb\xbfok\r\nok\nbad \xff", ["line 3", "byte offset 14", "0xff"]),
        (b"ok\nnul \0 word\n", ["line 2", "byte offset 7", "NUL"]),
        ("text\n".encode("utf-16"), ["UTF-16", "UTF-8"]),
        (b"\xfe\xff" + "text\n".encode("utf-16-be"), ["UTF-16", "UTF-8"]),
        ("text\n".encode("utf-16-le"), ["NUL", "line 1", "byte offset 1"]),
    ]
    for content, named in contents:
        with pytest.raises(InputError) as caught:
            read(tmp_path / "text", content, chunk_bytes)
        message = str(caught.value)
        assert "\n" not in message
        assert all(part in message for part in [str(tmp_path / "text"), *named]), (content, message)


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.folder=.*nowhere"):
        split_paths(DataConfig(source=Source.files, folder=str(tmp_path / "nowhere")))
    paths = split_paths(DataConfig(source=Source.files, folder=str(tmp_path)))
    with pytest.raises(InputError, match=r"wiki\.train\.tokens"):
        FilesSource(paths).key(tmp_path / "cache")


def test_key_follows_content_not_names(text_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source = FilesSource(split_paths(DataConfig(source=Source.files, folder=str(text_folder))))
    key = source.key(cache)

    moved = {split: tmp_path / f"{split}.txt" for split in source.paths}
    for split, path in source.paths.items():
        moved[split].write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert FilesSource(moved).key(cache) == key

    moved["test"].write_bytes(b"a dog\n")
    moved["valid"].write_bytes(b"the bird\n\n")
    assert FilesSource(moved).key(cache) != key  # the same lines, dealt out differently
    moved["test"].write_bytes(b"something else\n")
    assert FilesSource(moved).key(cache) != key
    swapped = {**source.paths, "train": source.paths["test"], "test": source.paths["train"]}
    assert FilesSource(swapped).key(cache) != key


def test_unchanged_files_are_hashed_once(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = split_paths(DataConfig(source=Source.files, folder=str(text_folder)))
    key = FilesSource(paths).key(tmp_path)
    monkeypatch.setattr(FilesSource, "chunks", lambda self, split: pytest.fail("read again"))
    assert FilesSource(paths).key(tmp_path) == key


def test_zipf_script_writes_the_counts_asked_for(tmp_path: Path) -> None:
    script = Path(__file__).parent / "generate_zipf.py"
    sizes = ["--train", "30000", "--valid", "500", "--test", "700", "--words", "2000"]
    subprocess.run([sys.executable, str(script), str(tmp_path), *sizes], check=True)
    for split, tokens in (("train", 30_000), ("valid", 500), ("test", 700)):
        text = (tmp_path / f"wiki.{split}.tokens").read_text()
        assert len(text.split()) + text.count("\n") == tokens
    assert len(set((tmp_path / "wiki.train.tokens").read_text().split())) == 2000
