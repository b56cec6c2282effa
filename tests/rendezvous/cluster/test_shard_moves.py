"""A replica logs in one line that it took shards over, from which owner and why, or that it lost them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.rendezvous.cluster import rebalance_log
from rallypoint.rendezvous.cluster.ownership import MoveSettings
from rallypoint.rpc.endpoint import parse_endpoint
from rendezvous.cluster.served import SHARDS, Served, joined, run_in, served, shared_out
from rendezvous.cut_proxy import CutProxy
from support.etcd_server import NEEDS_ETCD
from support.log_events import log_events
from support.waiting import until

pytestmark = NEEDS_ETCD

# No shard is moved for balance during a test.
_STAYING = MoveSettings(settle=3600.0, claim_interval=1.0)


class _Log:
    """The events of replicas at info and above, without the spread of shards at their start."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO)

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the fields of each event of that name, without its duration."""
        fields = [each.fields for each in log_events(self._caplog.records) if each.name == event]
        return [{key: value for key, value in each.items() if key != "seconds"} for each in fields]

    async def once(self, event: str) -> dict[str, Any]:
        """Wait for an event, which comes once."""
        await until(lambda: bool(self.of(event)), event)
        (fields,) = self.of(event)
        return fields

    def forget(self) -> None:
        """Drop the events so far."""
        self._caplog.clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> _Log:
    # With the default, a machine that stalls for a second would split one batch into two.
    monkeypatch.setattr(rebalance_log, "QUIET", 3.0)
    monkeypatch.setattr(rebalance_log, "LONGEST", 30.0)
    return _Log(caplog)


async def test_a_takeover_is_one_line(address: EtcdAddress, told: _Log) -> None:
    """For the first replica and for one that takes over: the number of shards and runs, and the previous owner."""
    async with served(address, "a", moves=_STAYING) as a:
        fields = await told.once("took free shards")
        assert (fields["shards"], fields["runs"]) == (SHARDS, 0)
        for shard in range(2):
            (await joined(a, run_in(shard))).cancel()
        async with served(address, "b") as b:
            await until(lambda: "b" in _live(a), "a to know of b")
            await until(lambda: len(b.known_owners) == SHARDS, "b to know whose the shards are")
            told.forget()
            await a.services.end()  # as one that vanishes, but its lease ends at once
            fields = await told.once("took shards over")
            assert len(b.serving) == SHARDS
    assert fields == {
        "shards": SHARDS,
        "runs": 2,
        "before": "a",
        "address": a.address,
        "how": "its lease ended",
        "why": fields["why"],
    }


async def test_a_drain_is_one_line_on_either_side(address: EtcdAddress, told: _Log) -> None:
    async with served(address, "a", moves=_STAYING) as a, served(address, "b", moves=_STAYING) as b:
        await until(lambda: len(a.serving | b.serving) == SHARDS and not a.serving & b.serving, "all shards")
        await until(lambda: len(a.known_owners) == len(b.known_owners) == SHARDS, "all to be known")
        # One of them may have claimed all.
        (giver, giver_name), (taker, taker_name) = [(a, "a"), (b, "b")] if a.serving else [(b, "b"), (a, "a")]
        count = len(giver.serving)
        told.forget()
        await giver.services.drain()
        assert told.of("handed shards over"), "logged before the server goes"
        given, taken = await told.once("handed shards over"), await told.once("took shards over")
        assert (given["shards"], given["to"], given["address"]) == (count, taker_name, taker.address)
        assert given["why"] == "this replica drains"
        assert (taken["shards"], taken["before"], taken["how"]) == (count, giver_name, "it handed them over")


@pytest.mark.slow
async def test_the_loss_of_all_shards_is_a_warning_with_its_cause(address: EtcdAddress, told: _Log) -> None:
    """One line; and another when there is a session again."""
    async with CutProxy(str(address.endpoints[0])) as proxy:
        cut_off = replace(address, endpoints=(parse_endpoint(proxy.address),))
        async with served(cut_off, "a") as a:
            await shared_out(a)
            told.forget()
            proxy.refuse()
            fields = await told.once("session with etcd lost, all shards dropped")
            assert fields["shards"] == SHARDS
            assert "could not be kept alive for 6 s" in fields["error"]
            proxy.heal()
            assert (await told.once("session with etcd"))["away"] > 0
            assert (await told.once("took free shards"))["shards"] == SHARDS


def _live(replica: Served) -> set[str]:
    cluster = replica.services.replica.cluster
    return set(cluster.live) if cluster is not None else set()
