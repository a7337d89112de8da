"""What comes from others: bounded and pinned versions, licences that fit, a container with little in it."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [
    requirement
    for lines in PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, lines)
    if requirement.name != PROJECT["name"]  # one extra that brings another
]
# What an Apache-2.0 project can depend on and be used with; MPL-2.0 asks for nothing but its own files.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "LLVM-exception",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
}
FREE_TEXT = {  # what older packages write instead of an SPDX name
    "Apache 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "The Unlicense (Unlicense)": "Unlicense",
}
NO_METADATA: dict[str, str] = {}  # read by hand in the package's own LICENSE file
OF_THE_GPU = re.compile(r"nvidia-|cuda-")  # NVIDIA's own libraries; torch's CUDA build alone needs them


def closure(requirements: list[Requirement]) -> set[str]:
    """Names of all installed packages that the requirements need."""
    found: set[str] = set()

    def walk(requirement: Requirement, extra: str = "") -> None:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            return
        name = canonicalize_name(requirement.name)
        if name in found:
            return
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            return
        found.add(name)
        for line in needed:
            for one in requirement.extras or {""}:
                walk(Requirement(line), one)

    for requirement in requirements:
        walk(requirement)
    return found


def licences(name: str) -> Iterator[str]:
    """The SPDX names in a package's metadata, or its own words where it has none."""
    metadata = distribution(name).metadata
    expression = metadata.get("License-Expression")
    if expression:
        yield from re.findall(r"[\w.+-]+", re.sub(r"\b(AND|OR|WITH)\b", " ", expression))
        return
    classified = [
        line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    words = [line for line in classified if line not in ("OSI Approved", "DFSG approved")]
    text = metadata.get("License") or ""
    if not words and text and "\n" not in text:
        words = re.split(r" (?:AND|OR) ", text)
    for word in words:
        yield FREE_TEXT.get(word, word)


def test_licences_fit_ours() -> None:
    names = [name for name in sorted(closure(RUNTIME)) if not OF_THE_GPU.match(name)]
    found = {name: set(licences(name)) or {NO_METADATA.get(name, "unknown")} for name in names}
    assert {name: sorted(words - ALLOWED) for name, words in found.items() if words - ALLOWED} == {}


def test_every_direct_dependency_was_looked_at() -> None:
    missing = {canonicalize_name(r.name) for r in RUNTIME} - closure(RUNTIME)
    assert not missing
    assert len(closure(RUNTIME)) > 40


def test_versions_are_bounded_on_both_sides() -> None:
    bounds = {str(each): {specifier.operator for specifier in each.specifier} for each in [*RUNTIME, *EXTRAS]}
    assert [name for name, operators in bounds.items() if not {">=", "<"} <= operators] == []


def pins() -> dict[str, Requirement]:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(r.name) for r in found}) == len(found)
    return {canonicalize_name(r.name): r for r in found}


def test_constraints_pin_everything_within_the_tested_ranges() -> None:
    pinned = pins()
    for requirement in pinned.values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert "*" not in specifier.version
        assert requirement.url is None
    for requirement in [*RUNTIME, *EXTRAS]:
        (specifier,) = pinned[canonicalize_name(requirement.name)].specifier
        assert specifier.version in requirement.specifier, requirement
    needed = {name for name in closure([*RUNTIME, *EXTRAS]) if not OF_THE_GPU.match(name)} - {"triton"}
    assert needed <= pinned.keys(), needed - pinned.keys()


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile and their arguments, in order."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_container_does_not_run_as_root() -> None:
    words = [word for word, _ in instructions()]
    users = [rest.split(":")[0] for word, rest in instructions() if word == "USER"]
    assert users, "no USER"
    assert users[-1] not in ("root", "0")
    assert "USER" not in words[words.index("CMD") :]
    last = len(words) - 1 - words[::-1].index("USER")
    after = [rest for word, rest in instructions()[last:] if word == "RUN"]
    assert any("pip install" in rest for rest in after), "packages are not installed by root"
    assert not any("sudo" in rest for rest in after)


def test_container_holds_nothing_secret() -> None:
    secret = re.compile(r"key|token|secret|passw|credential|netrc|login", re.IGNORECASE)
    for word, rest in instructions():
        assert word != "ARG", "build arguments stay in the image's history"
        assert word != "ADD", "ADD fetches and unpacks"
        if word in ("ENV", "LABEL", "RUN"):
            assert not secret.search(rest), rest
        if word == "COPY":
            sources = [part for part in rest.split() if not part.startswith("--")][:-1]
            assert not {".", "./", "*"} & set(sources), "only what is named goes in"
            assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", "runs", "wandb"} <= set(ignored)


def test_repository_holds_nothing_secret() -> None:
    shapes = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{30,}|[0-9a-f]{40})\b")
    allowed = {"b08601e04326c79dfdd32d625aee71d232d685c3"}  # the data set's revision
    for folder in ("allattn", "conf", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".json"):
                assert set(shapes.findall(path.read_text())) <= allowed, path
