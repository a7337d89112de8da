"""Two states of the package in turn."""

from pathlib import Path

import pytest
from paired_benchmark import ACTIONS, PRECISIONS, main
from support.processes import ROOT


@pytest.mark.slow
def test_a_row_for_every_action_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(ROOT), str(ROOT), "--rounds", "2", "--size", "tiny"])
    _head, _line, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(ACTIONS) * len(PRECISIONS)
    assert all(0 < float(row.split("|")[3]) < float("inf") for row in rows)


def test_a_folder_without_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(ROOT), str(tmp_path)])
    assert "does not hold the package's source" in capsys.readouterr().err
