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
from allattn.training.flat_names import flat

# Settings that change neither a number nor a file of the run; they may differ when it goes on.
_FREE = ("resume", "logger", "trainer.progress", "data.cache_folder", "runs_folder")
# What the saved state is about; no run goes on with another.
_FIXED = ("model", "optimizer.name", "data", "checkpoint", "seed")


class RunFolder:
    """Paths inside a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
            result = json.loads(self.result.read_text())
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
        if folder.config.exists():
            differing = _differences(_read_config(folder.config), config, defaults or {})
            saved = folder.last.exists() or folder.result.exists()
            fixed = [line for line in differing if _is_one_of(line.split(":")[0], _FIXED)]
            if saved and differing and (fixed or folder.result.exists() or not accept_changes):
                raise InputError(
                    f"{path}: holds a run with other settings ({'; '.join(differing)}); give this run "
                    "another name=, or go on with the changed ones by resume=changed (not with another "
                    f"{', '.join(_FIXED)}, nor where the run is finished)"
                )
        elif folder.last.exists() or folder.result.exists():
            raise InputError(f"{path}: holds results but no config.yaml; give this run another name=")
        elif foreign := [p.name for p in path.iterdir() if p.is_file() and not _is_a_runs(p)]:
            raise InputError(
                f"{path}: is no run's folder, it holds {foreign[0]}; give this run another name="
            )
        for leftover in [*path.glob(f"*{PARTIAL}"), *folder.checkpoints.glob(f"*{PARTIAL}")]:
            leftover.unlink()  # of a process that was killed
        try:
            write_atomically(folder.config, yaml.safe_dump(config, sort_keys=False))
            folder.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: the run folder cannot be written ({error.strerror})") from None
        with _noted_failure(folder):
            yield folder
    finally:
        lock.release()


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
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: is damaged, so it cannot be told whether this run goes on; give another name="
        )
    return config


def _differences(saved: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    old, new = dict(flat(defaults, ".")) | dict(flat(saved, ".")), dict(flat(now, "."))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_one_of(key, _FREE)
    ]


def _is_one_of(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
