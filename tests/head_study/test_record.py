"""A study's record outlasts a kill and belongs to one process and to one set of settings."""

from pathlib import Path

import pytest

from allattn.errors import InputError
from allattn.head_study.record import Record, own_folder

POINT = {"mask": "static", "score": "ahon_ln", "share": 0.1}


def test_what_was_measured_is_found_by_its_settings(tmp_path: Path) -> None:
    path, setting = tmp_path / "points.jsonl", {"model": "a", "tokens": 10}
    first = Record(path, setting)
    first.add(POINT, {"nats": 1.5})
    first.add({**POINT, "share": 0.2}, {"nats": float("inf")})
    with path.open("a") as file:
        file.write('{"key": "of a kil')
    again = Record(path, {"tokens": 10, "model": "a"})
    assert again.get(POINT) == {"nats": 1.5}
    again.add({**POINT, "share": 0.3}, {"nats": 2.0})
    assert Record(path, setting).get({**POINT, "share": 0.3}) == {"nats": 2.0}
    assert Record(path, setting).get({**POINT, "share": 0.2}) == {"nats": float("inf")}
    assert Record(path, {"model": "b", "tokens": 10}).get(POINT) is None


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text("step,loss\n1,2\n")
    with pytest.raises(InputError, match=r"line 1 is none of a study"):
        Record(path, {})
    assert path.read_text() == "step,loss\n1,2\n"


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    with own_folder(tmp_path), pytest.raises(InputError, match="another study"), own_folder(tmp_path):
        pass
    with own_folder(tmp_path):
        pass
