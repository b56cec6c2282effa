"""A service whose machine was suspended finds the streams of its nodes broken, and gives them time to come back."""

from __future__ import annotations

import time

import pytest

from rallypoint.rendezvous.base.errors import draining_error
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.shard.shard import open_shard
from rallypoint.rpc.clock import LagSettings

RUN = "run"


class Machine:
    """The clocks of a machine, set by the test: they differ by the time for which it was suspended."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.awake = self.suspended = 0.0
        clocks = {time.CLOCK_MONOTONIC: lambda: self.awake, time.CLOCK_BOOTTIME: self._boot_time}
        patch.setattr(time, "clock_gettime", lambda clock: clocks[clock]())

    def _boot_time(self) -> float:
        return self.awake + self.suspended


@pytest.mark.parametrize(("suspended", "there"), [(0.0, []), (12.0, ["a"])])
async def test_nodes_have_time_to_come_back_after_a_suspend(
    monkeypatch: pytest.MonkeyPatch, suspended: float, there: list[str]
) -> None:
    """As after a pause, a broken stream does not shorten a lease to the usual 2 s."""
    machine = Machine(monkeypatch)
    # The jumps of the test's clock are too short to count as a pause.
    shard = await open_shard(MemoryJournal(), lag=LagSettings(tolerance=5.0))
    settings = RunSettings(min_nodes=1, max_nodes=1)
    member = await shard.engine.join(RUN, commands.Join("a", settings, "a.cluster", 1, "trainer"))
    machine.suspended += suspended
    shard.engine.disconnect(member)
    machine.awake += 4.0
    assert [node.node_id for node in (await shard.engine.get_run(RUN)).nodes] == there
    for _ in range(3):
        machine.awake += 4.0
        run = await shard.engine.get_run(RUN)
    assert not run.nodes
    await shard.retire(draining_error)
