"""Signals that ask a run to stop: it saves itself first, and who listened before hears of it afterwards."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Notes the first of `STOPS` that comes inside the block; a second one ends the process at once.

    Only the main thread may listen: in another one nothing is noted and nothing changes. A signal that the
    process was started to ignore (nohup, a background job's Ctrl-C) stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not Python's to give back
                    self._before[number] = signal.signal(number, self.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of the signal.

        Raises:
            SystemExit: it is the second one.
        """
        if self.received is not None:
            raise SystemExit(128 + number)
        self.received = number


def hand_on(number: int) -> None:
    """Let the handler that was there before the run hear of the signal, as a scheduler's that queues again.

    It may end the process. Python's own for Ctrl-C is passed over, as the run has stopped already.
    """
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
