"""Where the articles of a text begin: at WikiText's titles, lines ` = Title = ` of level one."""

import re
from collections.abc import Iterator
from itertools import pairwise

_CANDIDATE = re.compile(rb"^ *= [^\n]* = *$", re.MULTILINE)


def at_titles(chunk: bytes) -> Iterator[tuple[bytes, bool]]:
    """Whole lines, cut before every title; with each piece, whether it begins with one."""
    titles = [line.start() for line in _CANDIDATE.finditer(chunk) if _is_title(line[0].split())]
    if titles[:1] != [0]:
        yield chunk[: titles[0] if titles else len(chunk)], False
    for begin, end in pairwise([*titles, len(chunk)]):
        yield chunk[begin:end], True


def _is_title(words: list[bytes]) -> bool:
    """One `=` on either side; a section's heading has two or more."""
    return len(words) > 2 and words[1] != b"=" and words[-2] != b"="
