"""Agents, guards, spawners and workers of a job are SIGKILLed at random: it goes on, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from statistics import median

import pytest

from local_cluster import LocalCluster
from support.processes import fresh_marker, gone
from torture.herd import Herd
from torture.length import ordinarily

pytestmark = [pytest.mark.slow, pytest.mark.integration]

AGENTS = ordinarily(6, in_full=100)
KILLS = ordinarily(4, in_full=50)
AT_ONCE = ordinarily(2, in_full=3)
PATIENCE = ordinarily(60.0, in_full=300.0)
# An agent opens connections and files as it runs: a few more than at first are no leak, one for each round would be.
SLACK = 4


@pytest.mark.timeout(4 * PATIENCE + KILLS * PATIENCE)
async def test_agents_killed_at_random_come_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are in the next round, and succeed at the end; no zombie, no lost descriptor, no temporary folder is left."""
    seed = int(os.environ.get("RALLYPOINT_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")  # noqa: T201
    draw = random.Random(seed)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with fresh_marker() as marker:
        monkeypatch.setenv("HERD_MARKER", marker)
        monkeypatch.setenv("TMPDIR", str(temporary))
        async with LocalCluster(tmp_path / "cluster") as cluster:
            await cluster.start_rendezvous()
            herd = Herd(cluster, tmp_path, AGENTS, PATIENCE)
            began = time.monotonic()
            await herd.start()
            formed = time.monotonic() - began
            at_first = await herd.descriptors()
            recoveries: list[float] = []
            while (left := KILLS - sum(herd.kills.values())) > 0:
                began = time.monotonic()
                run = await herd.strike(draw, min(left, draw.randint(1, AT_ONCE)))
                recoveries.append(time.monotonic() - began)
            await herd.burial()
            for part, counts in (await herd.descriptors()).items():
                for pid, count in counts.items():
                    limit = max(at_first[part].values()) + SLACK
                    assert count <= limit, f"{part} {pid} has {count} descriptors, at first {at_first[part]}"
            await herd.finish()
            assert sorted(path.name for path in temporary.iterdir()) == []
        assert gone(marker)
    print(  # noqa: T201
        f"{AGENTS} agents in a round after {formed:.1f} s; killed {herd.kills}, round {run.round}; all in a round "
        f"again after {median(recoveries):.2f} s (median; slowest {max(recoveries):.2f} s)"
    )
