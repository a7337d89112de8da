"""Reads the file that the W&B client leaves on disk when offline, by the format's own framing.

The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with chunks, each with a checksum
(4 bytes), a length (2) and a kind (1: whole, 2: first, 3: middle, 4: last part of a record). A record is a
protocol buffer of the package's own class.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK, CHUNK_HEADER = 7, 32 * 1024, 7
WHOLE, LAST = 1, 4


def read_records(path: Path) -> Iterator[Record]:
    """The file's records in order."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = HEADER, b""
    while place + CHUNK_HEADER <= len(data):
        rest = BLOCK - place % BLOCK
        if rest < CHUNK_HEADER:  # a block's end that holds no header is padding
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += CHUNK_HEADER
        parts += data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


def items(entries: Any) -> dict[str, Any]:
    """Key and value of a config's, history row's or summary's entries; nested keys joined by dots."""
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}
