"""Whatever is sent to a rendezvous service, it answers by its contract, keeps within its limits, and serves others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.campaign import attack, log_faults
from hostile.contract import documented_reasons
from hostile.requests import METHODS
from hostile.target import target

SEED = 1
# Requests that reach every method, and most reasons to refuse.
WORTH = 10_000


@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [1_500, pytest.param(WORTH, marks=pytest.mark.slow)])
async def test_a_server_bears_hostile_requests(tmp_path: Path, count: int) -> None:
    """No UNKNOWN, no INTERNAL, no bug, no error that the contract doesn't know; nothing left open; nobody starved.

    And 10,000 requests are worth sending: every method was reached, and most reasons to refuse were given.
    """
    documented = documented_reasons()
    ours = {path for path, method in METHODS.items() if method.containing_service.full_name in documented}
    with target(tmp_path, "sqlite:journal.db") as server:
        report = await attack(server, SEED, count)
        assert report.sent == count
        # Many senders give up early. On a busy machine, these may be all those that one method would have answered.
        unanswered = ours - set(report.answered)
        if count == WORTH and unanswered:
            unanswered -= set((await attack(server, SEED + 1, count)).answered)
        server.stop()
        assert report.faults + log_faults(server) == []
    if count < WORTH:
        return
    assert unanswered == set()
    assert len([reason for service, *reason in report.refused if service in documented]) >= 25
