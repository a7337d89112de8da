"""What a run's numbers were made with: the code's revision and the versions of the packages under it."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.backends.cpu import get_cpu_capability

_PACKAGES = (
    "allattn",
    "torch",
    "lightning",
    "hydra-core",
    "datasets",
    "tokenizers",
    "wandb",
    "pytorch-optimizer",
)


@cache
def environment() -> dict[str, Any]:
    """git_revision (None outside a checkout; `+changes` where files differ from it) and versions by name.

    Asked once a process: a checkout that changes while a run goes on is not what made its numbers.
    """
    versions = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    return {"git_revision": _git_revision(Path(__file__).resolve().parents[2]), "versions": versions}


def device_name(device: torch.device) -> str:
    """The kind of device and what is in use of it: a GPU's name, or the CPU's vector instructions."""
    on_gpu = device.type == "cuda"
    return f"{device.type} {torch.cuda.get_device_name(device) if on_gpu else get_cpu_capability()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout


def _git_revision(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    try:
        revision = _git(checkout, "rev-parse", "HEAD")
        return revision + ("+changes" if _git(checkout, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(checkout: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return answer.stdout.strip()
