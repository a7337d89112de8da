"""The fault script, with few trials."""

from pathlib import Path

import pytest
from fault_script import FAULTS, table, try_faults


@pytest.mark.slow
def test_faults_lose_nothing(tmp_path: Path) -> None:
    campaigns = try_faults(3, 1, tmp_path)
    for campaign in campaigns:
        assert campaign.complaints == []
        assert {name: count.tried for name, count in campaign.counts.items()} == dict.fromkeys(FAULTS, 3)
        assert sum(count.lost for count in campaign.counts.values()) == 0
        for name in ("SIGTERM", "Ctrl-C"):
            assert sum(campaign.counts[name].repeated) == 0, "a signal saves first"
    assert table(campaigns).count("same numbers, bit for bit") == 6
