"""Standard output and standard error as a long run needs them."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any


class _Lasting(io.FileIO):
    """A stream whose reader, a pipe's or a terminal, may go away: what is written from then on is dropped.

    So is what a full disk does not take; `lost` keeps the error.
    """

    lost: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                self.lost = error
            return memoryview(content).nbytes


def make_output_last() -> None:
    """Let no reader that goes away end the command, and replace characters that the terminal lacks by `?`.

    Standard error writes such characters as `\\u2026`, as Python's own does. What goes to a stream that was
    closed before the command began is dropped.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for good
            continue
        if not isinstance(stream, io.TextIOWrapper):
            continue
        errors = "replace" if name == "stdout" else stream.errors
        raw = getattr(stream.buffer, "raw", stream.buffer)  # unbuffered, there is no layer in between
        if type(raw) is not io.FileIO or raw.fileno() != number:
            stream.reconfigure(errors=errors)
            continue
        stream.flush()
        lasting = _Lasting(number, "w", closefd=False)
        text = io.TextIOWrapper(
            lasting if raw is stream.buffer else io.BufferedWriter(lasting),
            encoding=stream.encoding,
            errors=errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, text)


def end_output() -> None:
    """End a command that has done its work: where a full disk took not all that was printed, say so.

    Raises:
        SystemExit: status 1, in that case.
    """
    sys.stdout.flush()
    layer = getattr(sys.stdout, "buffer", None)
    lost = getattr(getattr(layer, "raw", layer), "lost", None)
    if lost is not None:
        print(
            f"error: what the command printed is not all written ({lost.strerror}); files that it names are",
            file=sys.stderr,
        )
        raise SystemExit(1)
