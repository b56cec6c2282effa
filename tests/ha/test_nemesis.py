"""Random faults for a cluster under load: no reply or report is wrong, and the cluster recovers afterwards."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest

from ha.cluster import PATIENCE
from ha.length import ordinarily
from ha.nemesis import play

pytestmark = [pytest.mark.slow, pytest.mark.integration]

MINUTES = float(os.environ.get("RALLYPOINT_HA_MINUTES", ordinarily(5.0, in_full=30.0)))


@pytest.mark.timeout(60 * MINUTES + 8 * PATIENCE)
async def test_random_faults_cause_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any fault reads and writes are linearizable, rounds keep their invariants, and reports are durable."""
    monkeypatch.setattr(logging.getLogger("rallypoint.rendezvous.client"), "disabled", True)
    seed = int(os.environ.get("RALLYPOINT_HA_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}, history and logs in {tmp_path}")  # noqa: T201
    report = await play(tmp_path, seed, 60 * MINUTES)
    print(report)  # noqa: T201
    again = f"replay: make test-ha ONLY=nemesis MINUTES={MINUTES:g} SEED={seed}"
    assert not report.findings, "\n".join([*map(str, report.findings[:20]), again])
    assert not report.complaints, "\n".join([*report.complaints[:5], again])
    assert not report.idle(), "\n".join([*report.idle(), again])
