"""One folder per run: who may write to it, and whether a start is a first one, goes on, or is done."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout

from allattn.errors import InputError, Interrupted
from allattn.files import PARTIAL, take_lock, write_atomically
from allattn.training.resumable_settings import BY_CONTENT, Changes, changes, fixed, listed


class RunFolder:
    """Paths inside a run folder, and which settings differ from those that it was written with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed: Changes = {}
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.result = path / "result.json"
        self.articles = path / "articles.json"  # nats by article, of each model and split of result.json
        self.failure = path / "failure.txt"  # the error that ended the last start, if one did
        self.checkpoints = path / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"
        self.best = self.checkpoints / "best.ckpt"
        self.gates = self.checkpoints / "gates.ckpt"  # the pruning run at its freeze, before the removal
        self.tokenizer = self.checkpoints / "tokenizer.json"

    def finished(self) -> dict[str, Any] | None:
        """The result of a run that is done.

        Raises:
            InputError: result.json is damaged.
        """
        if not self.result.exists():
            return None
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            perplexity = result.get("pruned", result["dense"])["test"]["perplexity"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            perplexity = None
        if not isinstance(perplexity, float | int):
            raise InputError(
                f"{self.result}: is damaged; remove it, and the same command scores {self.last} again"
            )
        return result

    def last_saved(self) -> str:
        """Which checkpoint an error leaves behind."""
        return f"the last good checkpoint is {self.last}" if self.last.exists() else "nothing was saved yet"

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.yaml, once what is saved is known to belong to these settings."""
        write_atomically(self.config, yaml.safe_dump(config, sort_keys=False))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json; its presence says that the run is done."""
        write_atomically(self.result, json.dumps(result, indent=2) + "\n")


def result_line(folder: RunFolder, result: dict[str, Any]) -> str:
    """What a second start of a finished run says."""
    model = result.get("pruned", result["dense"])
    return (
        f"{folder.path} is finished: test perplexity {model['test']['perplexity']:.2f} (see {folder.result})"
    )


@contextmanager
def open_run_folder(
    path: Path, config: dict[str, Any], accept_changes: bool, defaults: dict[str, Any] | None = None
) -> Iterator[RunFolder]:
    """Take the folder for this run: create it, or go on in it if it belongs to the same configuration.

    Settings that go by content (`resumable_settings.BY_CONTENT`) may differ here: where something is saved,
    the caller compares what they lead to and then calls `write_config`.

    Args:
        path: the run folder.
        config: the resolved configuration, plain values.
        accept_changes: go on although the saved configuration is another one.
        defaults: what settings were that a saved configuration of an earlier version does not have.

    Raises:
        InputError: another run is writing there, the folder is not a run's, its configuration differs, or its
            file system has no locks.
    """
    folder = RunFolder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path / ".lock", "runs_folder", timeout=0)
    except Timeout:
        raise InputError(
            f"{path}: another run is writing to this folder; give this one another name="
        ) from None
    except OSError as error:
        raise InputError(f"{path}: the run folder cannot be written ({error.strerror})") from None
    try:
        saved = folder.last.exists() or folder.result.exists()
        if folder.config.exists():
            if saved:
                before = _read_config(folder.config)
                _refuse_other_stage(path, before, config)
                folder.changed = changes(before, config, defaults or {})
                _refuse_changes(folder, accept_changes)
        elif saved:
            raise InputError(f"{path}: holds results but no config.yaml; give this run another name=")
        elif foreign := [p.name for p in path.iterdir() if p.is_file() and not _is_a_runs(p)]:
            raise InputError(
                f"{path}: is no run's folder, it holds {foreign[0]}; give this run another name="
            )
        for leftover in [*path.glob(f"*{PARTIAL}"), *folder.checkpoints.glob(f"*{PARTIAL}")]:
            leftover.unlink()  # of a process that was killed
        try:
            if not saved:
                folder.write_config(config)
            folder.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: the run folder cannot be written ({error.strerror})") from None
        with _noted_failure(folder):
            yield folder
    finally:
        lock.release()


def _refuse_other_stage(path: Path, before: dict[str, Any], config: dict[str, Any]) -> None:
    held, this = ("pruning" if "gates" in each else "pretraining" for each in (before, config))
    if held != this:
        raise InputError(f"{path}: holds a {held} run, and this is a {this} run; give it another name=")


def _refuse_changes(folder: RunFolder, accept_changes: bool) -> None:
    differing = {name: change for name, change in folder.changed.items() if name not in BY_CONTENT}
    if not differing:
        return
    held = f"{folder.path}: holds a run with other settings ({listed(differing)})"
    if folder.result.exists():
        raise InputError(f"{held}, and it is finished; give this run another name=")
    if unchangeable := fixed(differing):
        raise InputError(
            f"{held}; {', '.join(unchangeable)} cannot change where a run goes on: give this run another "
            "name="
        )
    if not accept_changes:
        raise InputError(f"{held}; give this run another name=, or go on with them by resume=changed")


@contextmanager
def _noted_failure(folder: RunFolder) -> Iterator[None]:
    """Keep the error that ends an unfinished run, so that a comparison can name it."""
    folder.failure.unlink(missing_ok=True)
    try:
        yield
    except Interrupted:
        raise  # saved; it goes on
    except Exception as error:
        with suppress(OSError):  # the disk may be full: the error itself counts
            if not folder.result.exists():
                write_atomically(
                    folder.failure, f"{error or type(error).__name__}\n".encode(errors="replace")
                )
        raise


def _is_a_runs(file: Path) -> bool:
    """Whether a start that was killed before config.yaml was written leaves such a file."""
    return file.name == ".lock" or file.suffix == PARTIAL


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: is damaged, so it cannot be told whether this run goes on; give another name="
        )
    return config
