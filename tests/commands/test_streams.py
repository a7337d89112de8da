"""Terminals with few characters, and readers that go away."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allattn.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SAY = "from allattn.commands.streams import make_output_last; make_output_last(); import sys; "


def python(*words: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process whose two outputs are one pipe."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [("ascii", b"gr??e ?\n"), ("latin-1", b"gr\xf6\xdfe ?\n"), ("utf-8", "größe …\n".encode())],
)
def test_characters_that_the_terminal_lacks_are_replaced(encoding: str, printed: bytes) -> None:
    """A name that is no UTF-8 (a surrogate, to Python) is printed too."""
    saying = python("-c", f"{SAY}print('größe …'); print('\\udcff')", PYTHONIOENCODING=encoding)
    assert saying.communicate()[0] == printed + b"?\n"
    assert saying.returncode == 0


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_a_reader_that_goes_away_ends_nothing(flags: list[str], tmp_path: Path) -> None:
    """Both outputs, much more than a pipe holds, and the flush at the end."""
    writing = "[print('x' * 1000, file=f) for f in (sys.stdout, sys.stderr) for _ in range(200)]; "
    code = f"{SAY}{writing}open('{tmp_path}/done', 'w').close(); print('last')"
    process = python(*flags, "-c", code)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("closed", ["1", "2"])
def test_an_output_that_was_closed_before_the_start_ends_nothing(closed: str, tmp_path: Path) -> None:
    """As `>&-` does; Python has None in its place."""
    code = f"{SAY}sys.stdout.write('x'); sys.stderr.write('x'); sys.{{}}.isatty(); open('done', 'w').close()"
    code = code.format("stdout" if closed == "1" else "stderr")
    shell = f'exec "$0" -c "$1" {closed}>&-'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-c", shell, sys.executable, code], cwd=tmp_path, env=environment, check=False)
    assert (tmp_path / "done").exists()


def test_a_terminal_that_goes_away_ends_nothing() -> None:
    """Writing to it is an input/output error, of both outputs; and so it is at the flush."""
    terminal, process_side = os.openpty()
    code = f"{SAY}import os; os.close(int(sys.argv[1])); print('x' * 10_000, flush=True); print('last')"
    done = subprocess.Popen(
        [sys.executable, "-c", code, str(terminal)],
        stdout=process_side,
        stderr=process_side,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[terminal],
        cwd=ROOT,
    )
    os.close(process_side)
    os.close(terminal)
    assert done.wait() == 0


def test_training_goes_on_without_its_reader(pretraining: Callable[..., list[str]], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "alone")
    arguments = pretraining(folder, "schedule.steps=6", "schedule.warmup_steps=2", "trainer.progress=true")
    process = python("train.py", *arguments)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert folder.result.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_under_the_output_ends_nothing_and_is_said(tmp_path: Path) -> None:
    """The work is done to its end; one line and the status say that the printed text is not whole."""
    code = "print('x' * 100_000); open('done', 'w').close(); end_output()"
    code = f"{SAY}from allattn.commands.streams import end_output; {code}"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
    assert (tmp_path / "done").exists()
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: what the command printed is not all written (No space left on device)")
    with Path("/dev/full").open("w") as full:
        helped = subprocess.run(
            [sys.executable, "-m", "allattn"], stdout=full, stderr=subprocess.PIPE, cwd=ROOT
        )
    assert (helped.returncode, helped.stderr.count(b"\n")) == (1, 1)
