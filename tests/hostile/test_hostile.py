"""A service answers any request by its contract, keeps within its limits, and serves others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.campaign import attack, log_faults
from hostile.contract import documented_reasons
from hostile.kinds import KINDS, Kind
from hostile.target import target
from support.marks import slow

SEED = 1
# Requests that reach every method, and most reasons to refuse.
WORTH = 10_000


@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@pytest.mark.parametrize("count", [300, slow(WORTH)])
async def test_a_server_bears_hostile_requests(tmp_path: Path, kind: Kind, count: int) -> None:
    """No UNKNOWN, no INTERNAL, no bug, no undocumented error; nothing is left open; no other client starves.

    And 10,000 requests are worth sending: every method was reached, and most reasons to refuse were given.
    """
    documented = documented_reasons()
    ours = {
        path
        for path, method in kind.methods.items()
        if method.containing_service.full_name in kind.services and not path.endswith(kind.by_luck)
    }
    answered: set[str] = set()
    refusals: set[tuple[str, str, str]] = set()

    def is_worth() -> bool:
        return ours <= answered and len(refusals) >= kind.worth

    with target(tmp_path, kind) as server:
        # Many senders give up early. On a busy machine, these may be the only ones for a method or reason: then
        # another seed is tried.
        for seed in range(SEED, SEED + 4):
            report = await attack(server, kind, seed, count)
            answered |= set(report.answered)
            refusals |= {refusal for refusal in report.refused if refusal[0] in documented}
            assert report.faults == []
            assert report.sent == count
            if count < WORTH or is_worth():
                break
        server.stop()
        assert log_faults(server, kind) == []
    assert count < WORTH or is_worth(), (ours - answered, sorted(refusals))
