"""Nested records under one name per value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no mapping, with the names on the way to it joined by `separator`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def among(name: str, settings: Sequence[str]) -> bool:
    """Whether a list of dotted names holds a setting or its group."""
    return any(name == one or name.startswith(f"{one}.") for one in settings)
