"""Several replicas over one etcd: the shards that each serves, and the redirects that clients get."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.values import Delete, Put, Txn
from rallypoint.rendezvous.cluster import replica
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.ownership import shard_of
from rallypoint.rendezvous.cluster.view import ReplicaRegistration
from rallypoint.rendezvous.runs import recovery
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rpc.endpoint import SettingError, parse_endpoint
from rallypoint.rpc.errors import decode
from rendezvous.cluster.served import SHARDS, insisting, joined, run_in, served, shared_out
from rendezvous.cut_proxy import CutProxy
from support.etcd_server import NEEDS_ETCD
from support.refusals import refusal
from support.waiting import PATIENCE, until

pytestmark = NEEDS_ETCD


async def test_shards_are_shared_out_among_all_replicas(address: EtcdAddress) -> None:
    """The first one gets them all at once; the others get theirs when they start."""
    async with served(address, "a") as a:
        await shared_out(a)
        async with served(address, "b") as b, served(address, "c") as c:
            await shared_out(a, b, c)
            assert len(a.serving) + len(b.serving) + len(c.serving) == SHARDS


async def test_a_run_of_another_replica_is_refused_with_its_address(address: EtcdAddress) -> None:
    """Nothing was done, and clients know the owner without another request."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        run_id = run_in(min(b.serving))
        error = await refusal(a.rendezvous.CloseRun(pb.CloseRunRequest(run_id=run_id), timeout=PATIENCE))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_OWNER")
        assert error.metadata == {"run_id": run_id, "owner_address": b.address}
        error = await refusal(a.set_state(run_id, b"mine"))
        assert (error.reason, error.metadata["owner_address"]) == ("NOT_OWNER", b.address)
        await b.set_state(run_id, b"mine")


async def test_no_replica_redirects_to_itself(address: EtcdAddress) -> None:
    """etcd names it as owner of a shard that it hands over or claims: clients would go in a circle."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        known = {shard: a.services.replica.owner_address(shard) for shard in range(SHARDS)}
        assert known == {shard: b.address if shard in b.serving else None for shard in range(SHARDS)}


async def test_every_replica_reads_the_acknowledged_writes_of_any(address: EtcdAddress) -> None:
    """Each read sees the previous write, at every replica, also right after an older value was read."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        run_id = run_in(min(b.serving))
        token = None
        for number in range(20):
            answer = await b.set_state(run_id, b"%d" % number, token)
            assert answer.has_set
            token = answer.current.token
            for asked in (a, b):
                assert await asked.get_state(run_id) == answer.current


async def test_a_state_that_is_only_read_through_another_replica_lives_on(address: EtcdAddress) -> None:
    """As long as one that is read at its owner. Some reads are redirected to the owner, which counts them as use."""
    ttl, ahead = 1000.0, 0.0

    def clock() -> float:
        return time.monotonic() + ahead

    async with (
        served(address, "a", clock=clock, state_ttl=ttl) as a,
        served(address, "b", clock=clock, state_ttl=ttl) as b,
    ):
        await shared_out(a, b)
        shard = min(b.serving)
        run_id = run_in(shard)
        beside = next(name for n in range(10_000) if shard_of(name := f"beside-{n}", SHARDS) == shard)
        request = state_pb.GetStateRequest(run_id=run_id)
        await b.set_state(run_id, b"still wanted")
        sent = 0
        for _ in range(120):
            ahead += ttl / 80
            await b.set_state(beside, b"")  # the owner reads its clock
            try:
                answer = await a.states.GetState(request, timeout=PATIENCE)
            except grpc.aio.AioRpcError as error:
                if decode(error).metadata.get("owner_address") != b.address:
                    raise
                answer = await b.states.GetState(request, timeout=PATIENCE)
                sent += 1
            assert answer.current.state == b"still wanted"
        assert sent <= 25, "most reads are answered where they come"
        ahead += 1.1 * ttl
        await b.set_state(beside, b"")
        assert not (await b.states.GetState(request, timeout=PATIENCE)).HasField("current")


async def test_a_run_that_can_not_be_taken_over_is_stopped_and_its_shard_is_not(
    address: EtcdAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug with one run: the next owner refuses it, and serves all other runs of the shard."""
    fold = recovery._fold

    def trip(run: Any, record: Any, *rest: Any) -> None:
        if record.run_id == "broken":
            raise KeyError(record.run_id)
        fold(run, record, *rest)

    async with served(address, "a", shards=1) as a:
        await until(lambda: a.serving == {0}, "a to serve")
        calls = [await joined(a, run_id) for run_id in ("broken", "whole")]
        monkeypatch.setattr(recovery, "_fold", trip)
        async with served(address, "b", shards=1) as b:
            await until(lambda: b.services.replica.cluster is not None, "b to be there")
            await a.services.drain()
            await until(lambda: b.serving == {0}, "b to serve")
            error = await refusal(b.rendezvous.GetRun(pb.GetRunRequest(run_id="broken"), timeout=PATIENCE))
            assert error.reason == "RUN_BROKEN"
            run = (await b.rendezvous.GetRun(pb.GetRunRequest(run_id="whole"), timeout=PATIENCE)).run
            assert [node.node_id for node in run.nodes] == ["n"]
            await b.set_state("whole", b"goes on")
        for call in calls:
            call.cancel()


async def test_acknowledged_writes_survive_the_drain_of_a_replica(address: EtcdAddress) -> None:
    """Its shards move to the others before it ends; its streams end, with the address, once the new owner is known."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        run_id = run_in(min(b.serving))
        set_ = await b.set_state(run_id, b"before")
        watch = b.states.WatchState(state_pb.WatchStateRequest(run_id=run_id), timeout=PATIENCE)
        first = await watch.read()
        assert isinstance(first, state_pb.WatchStateResponse)
        assert first.current == set_.current
        draining = asyncio.create_task(b.services.drain())
        error = await refusal(watch.read())
        assert (error.reason, error.metadata) == ("NOT_OWNER", {"run_id": run_id, "owner_address": a.address})
        answer = await insisting(lambda: a.set_state(run_id, b"after", set_.current.token))
        assert answer.has_set
        await draining
        assert b.serving == set()
        assert b.readiness == [True, False]
        await shared_out(a)


async def test_a_draining_replica_hands_over_to_one_that_came_before(
    address: EtcdAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it does not know of the new replica yet: a stream without a redirect must search for its run."""
    watch, late = EtcdClient.watch, set[EtcdClient]()

    async def delayed_watch(client: EtcdClient, key: bytes, end: bytes, revision: int) -> AsyncIterator[Any]:
        async with aclosing(watch(client, key, end, revision)) as watching:
            async for changes in watching:
                if client in late:
                    late.discard(client)
                    await asyncio.sleep(0.5)
                yield changes

    monkeypatch.setattr(EtcdClient, "watch", delayed_watch)
    async with served(address, "a") as a:
        await shared_out(a)
        run_id = run_in(0)
        await a.set_state(run_id, b"before")
        stream = a.states.WatchState(state_pb.WatchStateRequest(run_id=run_id), timeout=PATIENCE)
        await stream.read()
        late.add(a.services.replica._client)
        async with served(address, "b") as b:
            await until(lambda: b.services.replica.cluster is not None, "the newcomer to be there")
            draining = asyncio.create_task(a.services.drain())
            error = await refusal(stream.read())
            assert (error.reason, error.metadata.get("owner_address")) == ("NOT_OWNER", b.address)
            await draining


async def test_a_replica_is_listed_until_it_has_drained(address: EtcdAddress) -> None:
    """Any replica lists the shards of all, and the owner of a run."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        run_id = run_in(min(b.serving))
        answer = await a.listed(run_id)
        assert [(each.name, each.address, each.shards) for each in answer.replicas] == [
            ("a", a.address, len(a.serving)),
            ("b", b.address, len(b.serving)),
        ]
        assert (answer.answered_by, answer.journal, answer.shards, answer.free_shards) == (
            "a",
            "etcd",
            SHARDS,
            0,
        )
        assert (answer.run.owner_name, answer.run.owner_address, answer.run.shard) == (
            "b",
            b.address,
            min(b.serving),
        )
        await b.services.drain()
        assert [each.name for each in (await a.listed()).replicas] == ["a"]


async def test_a_replica_that_vanishes_is_replaced_when_its_lease_ends(address: EtcdAddress) -> None:
    """Cut off from etcd it releases everything by its own clock; the next owner has all acknowledged writes."""
    async with CutProxy(str(address.endpoints[0])) as proxy:
        cut_off = replace(address, endpoints=(parse_endpoint(proxy.address),))
        async with served(address, "a") as a, served(cut_off, "b") as b:
            await shared_out(a, b)
            run_id = run_in(min(b.serving))
            set_ = await b.set_state(run_id, b"before")
            watch = b.states.WatchState(state_pb.WatchStateRequest(run_id=run_id), timeout=PATIENCE)
            await watch.read()
            proxy.refuse()
            error = await refusal(watch.read())
            assert error.reason == "NOT_OWNER"
            await until(lambda: len(a.serving) == SHARDS, "a to serve everything")
            assert b.serving == set()
            assert (await a.set_state(run_id, b"after", set_.current.token)).has_set
            for call in (
                b.states.GetState(state_pb.GetStateRequest(run_id=run_id), timeout=PATIENCE),
                b.set_state(run_id, b"too late", set_.current.token),
                b.rendezvous.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE),
                b.rendezvous.ListReplicas(pb.ListReplicasRequest(), timeout=PATIENCE),
            ):
                error = await refusal(call)
                assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ETCD_UNAVAILABLE")
            assert b.readiness == [True, False]
            proxy.heal()
            await shared_out(a, b)
            assert b.readiness == [True, False, True]
            assert (await b.get_state(run_id)).state == b"after"


async def test_runs_of_all_replicas_are_listed_by_each(address: EtcdAddress) -> None:
    """Once each, in order, however they are spread."""
    async with served(address, "a") as a, served(address, "b") as b:
        await shared_out(a, b)
        run_ids = sorted(run_in(shard) for shard in range(SHARDS))
        streams = []
        for run_id in run_ids:
            owner = a if (await a.listed(run_id)).run.owner_name == "a" else b
            stream = owner.rendezvous.Join(timeout=PATIENCE)
            settings = pb.RunSettings(min_nodes=2, max_nodes=2)
            join = pb.JoinRun(
                run_id=run_id, node_id="n", address="10.0.0.1", local_world_size=1, settings=settings
            )
            await stream.write(pb.JoinRequest(join=join))
            answer = await stream.read()
            assert isinstance(answer, pb.JoinResponse)
            assert answer.lease.number
            streams.append(stream)
        for asked in (a, b):
            for _ in range(2):  # from etcd, and from the kept copy
                listed = await asked.rendezvous.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE)
                assert [run.run_id for run in listed.runs] == run_ids
        for stream in streams:
            stream.cancel()


@pytest.mark.slow
async def test_a_second_replica_of_the_same_name_is_refused(address: EtcdAddress) -> None:
    """The error has the address of the first one, which is not disturbed."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(served(address, "a"))
        await shared_out(first)
        second = await stack.enter_async_context(served(address, "a"))
        await until(lambda: bool(second.failures), "the second to be refused")
        (error,) = second.failures
        assert isinstance(error, SettingError)
        assert str(error) == (
            f"--replica-name: a replica 'a' is alive already, at {first.address}: stop that one, or give this one "
            "another name"
        )
        assert first.serving == set(range(SHARDS))
        assert second.serving == set()


async def test_a_replica_that_was_killed_is_followed_by_the_next_of_its_name(
    address: EtcdAddress, client: EtcdClient
) -> None:
    """It waits until the dead one's lease ends."""
    lease, _ = await client.grant(2)
    keys = Keys(address.prefix)
    dead = ReplicaRegistration("10.9.9.9:29400", "dead", 0.0, lease_ttl=2.0)
    await client.transact(Txn([], [Put(keys.replica("a"), dead.encode(), lease)]))
    async with served(address, "a") as a:
        await shared_out(a)
        assert a.failures == []


async def test_a_deleted_owner_key_loses_no_acknowledged_write(
    address: EtcdAddress, client: EtcdClient
) -> None:
    """The owner's next commit fails; the shard is claimed and read again, with all acknowledged writes."""
    async with served(address, "a") as a:
        await shared_out(a)
        run_id = run_in(3)
        token = (await a.set_state(run_id, b"before")).current.token
        await client.transact(Txn([], [Delete(Keys(address.prefix).owner(3))]))
        answer = await insisting(lambda: a.set_state(run_id, b"after", token))
        # If an attempt with "outcome unknown" has set it, the token shows that.
        assert answer.current.state == b"after"


async def test_an_owner_whose_key_is_deleted_sends_nothing_more(
    address: EtcdAddress, client: EtcdClient
) -> None:
    """Also without a write: others may now claim the shard, and its reply from memory may be outdated."""
    async with served(address, "a") as a:
        await shared_out(a)
        run_id = run_in(3)
        set_ = await a.set_state(run_id, b"before")
        watch = a.states.WatchState(state_pb.WatchStateRequest(run_id=run_id), timeout=PATIENCE)
        first = await watch.read()
        assert isinstance(first, state_pb.WatchStateResponse)
        await client.transact(Txn([], [Delete(Keys(address.prefix).owner(3))]))
        assert (await refusal(watch.read())).reason == "NOT_OWNER"
        await shared_out(a)
        assert await a.get_state(run_id) == set_.current
        assert a.readiness == [True]  # clients of other shards are not affected


async def test_a_deleted_registration_comes_back(address: EtcdAddress, client: EtcdClient) -> None:
    """At once, and in the same session: its clients are not affected."""
    key = Keys(address.prefix).replica("a")
    async with served(address, "a") as a:
        await shared_out(a)
        written = await client.transact(Txn([], [Delete(key)]))
        async with aclosing(client.watch(key, b"", written.revision + 1)) as watching:
            async for changes in watching:
                if any(not change.deleted for change in changes):
                    break
        await shared_out(a)
        assert a.readiness == [True]


async def test_changes_during_a_broken_connection_are_known_afterwards(
    address: EtcdAddress, client: EtcdClient
) -> None:
    """Even if etcd has compacted the changes: then all is read again."""
    async with CutProxy(str(address.endpoints[0])) as proxy:
        through_proxy = replace(address, endpoints=(parse_endpoint(proxy.address),))
        async with served(through_proxy, "a", ttl=30.0) as a:
            await shared_out(a)
            proxy.refuse()
            keys = Keys(address.prefix)
            other = ReplicaRegistration("10.9.9.9:29400", "other", 0.0, lease_ttl=2.0)
            for _ in range(3):
                written = await client.transact(Txn([], [Put(keys.replica("z"), other.encode())]))
            await _compact(address, written.revision)
            proxy.heal()
            await until(lambda: "z" in a.services.replica.cluster.live, "z to be known")  # type: ignore[union-attr]
            assert a.readiness == [True]
            await client.transact(Txn([], [Delete(keys.replica("z"))]))
            await until(lambda: "z" not in a.services.replica.cluster.live, "z to be gone")  # type: ignore[union-attr]


async def test_replicas_that_disagree_about_the_shards_do_not_mix(address: EtcdAddress) -> None:
    """The later one ends with the remedy, before it has changed anything."""
    async with served(address, "a", shards=8) as a:
        await shared_out(a)
        async with served(address, "b", shards=16) as b:
            await until(lambda: bool(b.failures), "b to be refused")
            assert "has 8 shards, not 16" in str(b.failures[0])


async def test_a_start_without_etcd_waits_for_it(address: EtcdAddress) -> None:
    """It listens and reports that it is not ready; it gets ready when etcd is reachable."""
    async with CutProxy(str(address.endpoints[0])) as proxy:
        proxy.refuse()
        late = replace(address, endpoints=(parse_endpoint(proxy.address),), request_timeout=1.0)
        async with served(late, "a") as a:
            for call in (a.set_state("job", b"x"), a.get_state("job"), a.listed()):
                assert (await refusal(call)).reason == "ETCD_UNAVAILABLE"
            assert a.readiness == []
            proxy.heal()
            await shared_out(a)
            assert a.readiness == [True]


async def test_many_replicas_that_come_and_go_leave_no_shard_behind(address: EtcdAddress) -> None:
    """With and without a drain: in the end the last replica serves everything that was acknowledged."""
    async with served(address, "z") as last:
        await shared_out(last)
        tokens: dict[int, bytes] = {}
        for round_ in range(3):
            async with AsyncExitStack() as stack:
                others = [
                    await stack.enter_async_context(served(address, f"{name}{round_}")) for name in "ab"
                ]
                await shared_out(last, *others)
                for shard in range(SHARDS):
                    owner = next(each for each in (last, *others) if shard in each.serving)
                    answer = await owner.set_state(run_in(shard), b"%d" % round_, tokens.get(shard))
                    assert answer.has_set
                    tokens[shard] = answer.current.token
                await others[0].services.drain()
                assert others[0].serving == set()
            await shared_out(last)
        for shard in range(SHARDS):
            assert (await last.get_state(run_in(shard))).token == tokens[shard]


async def _compact(address: EtcdAddress, revision: int) -> None:
    process = await asyncio.create_subprocess_exec(
        "etcdctl",
        f"--endpoints=http://{address.endpoints[0]}",
        "compact",
        str(revision),
        env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin:/usr/local/bin"},
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0


@pytest.mark.parametrize("keeps_etcd", [True, False])
async def test_advice_on_etcd_is_a_warning_only_for_its_operator(
    address: EtcdAddress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keeps_etcd: bool
) -> None:
    """The user of a job can't act on it, so it is logged at INFO."""

    async def advice(client: EtcdClient) -> list[str]:
        return ["upgrade it"]

    monkeypatch.setattr(replica, "check_versions", advice)
    caplog.set_level(logging.INFO)
    async with served(address, "a", keeps_etcd=keeps_etcd) as a:
        await shared_out(a)
    (told,) = [each for each in caplog.records if "upgrade it" in each.getMessage()]
    assert told.levelno == (logging.WARNING if keeps_etcd else logging.INFO)
