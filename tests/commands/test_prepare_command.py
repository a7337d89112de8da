from pathlib import Path

from support.command_fixtures import CommandLine


def test_a_run_finds_what_was_prepared(command_line: CommandLine, text_folder: Path, tmp_path: Path) -> None:
    """The counts are by hand: two words and <eos>, <eos> alone, three and <eos>, two and <eos>."""
    settings = ["data=files", f"data.folder={text_folder}", f"data.cache_folder={tmp_path / 'cache'}"]
    first = command_line("prepare", *settings, "progress=false")
    assert first.status == 0, first.err
    assert "train: 11 tokens\nvalid: 3 tokens\ntest: 4 tokens\n" in first.out
    encoded = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    second = command_line("prepare", *settings)
    assert second.out == first.out
    assert {path: path.stat().st_mtime_ns for path in encoded} == encoded


def test_a_checkpoints_text_is_refused(command_line: CommandLine) -> None:
    ended = command_line("prepare", "data=checkpoint")
    assert ended.status == 2
    assert "name the text itself" in ended.err


def test_several_texts_are_prepared_by_one_command(
    command_line: CommandLine, text_folder: Path, tmp_path: Path
) -> None:
    files = ["data=files", f"data.folder={text_folder}", f"data.cache_folder={tmp_path}/cache"]
    done = command_line("prepare", "-m", *files, "data.minimum_count=1,2", "progress=false")
    assert done.status == 0, done.err
    assert done.out.count("vocabulary: ") == 2
