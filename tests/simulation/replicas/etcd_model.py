"""An etcd cluster of three members: keys with revisions, transactions, leases, watches, compaction, a quota, elections.

The state that a majority has agreed on is one store. A member that reaches the leader forwards its requests; one that
does not keeps its callers waiting, then refuses them with "no leader". A leader that was cut off or paused believes for
a moment that it still leads, and renews leases, without effect. The response of a request that was carried out may be
lost, and a request may be carried out long after its client has given up.

Not modelled: fragments of large watches, users, learners, and members that lag behind while they reach the leader.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from rallypoint.etcd.v1 import kv_pb2, lease_pb2, maintenance_pb2, watch_pb2
from simulation.clockwork import Clockwork, Process
from simulation.network import Connection
from simulation.wire import ServerCall, Status

MEMBERS = 3
_MAJORITY = 2
# Seconds: between two checks for a leader and for expired leases; without a leader before an election; for which a
# leader that lost its majority believes that it leads; for which a member waits for the majority.
_LOOK = 0.25
_ELECTION = (1.0, 1.8)
_BELIEF = 2.0
_REQUEST = 5.0
_SHORTEST_LEASE = 2
_LEADERLESS = "etcdserver: no leader"

Apply = Callable[[], Any]


@dataclass(slots=True)
class _Lease:
    ttl: int
    ends: float
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Commit:
    """A committed transaction: its puts and deleted keys, its revision, and the keys before it."""

    revision: int
    puts: Sequence[kv_pb2.PutRequest]
    before: dict[bytes, kv_pb2.KeyValue]
    deleted: Sequence[bytes]


class Store:
    """The state that the majority has agreed on."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.full = False
        self.pairs: dict[bytes, kv_pb2.KeyValue] = {}
        self.leases: dict[int, _Lease] = {}
        self.events: list[watch_pb2.Event] = []

    def select(self, key: bytes, end: bytes) -> list[kv_pb2.KeyValue]:
        """Return the keys of a range, in order."""
        if not end:
            pair = self.pairs.get(key)
            return [] if pair is None else [pair]
        return [
            self.pairs[each] for each in sorted(self.pairs) if each >= key and (end == b"\0" or each < end)
        ]

    def read(self, request: kv_pb2.RangeRequest) -> kv_pb2.RangeResponse:
        """Return a range at the present revision."""
        found = self.select(request.key, request.range_end)
        answer = kv_pb2.RangeResponse(count=len(found))
        if request.count_only:
            return answer
        limited = found[: request.limit] if request.limit else found
        answer.more = len(limited) < len(found)
        for pair in limited:
            copy = answer.kvs.add()
            copy.CopyFrom(pair)
            if request.keys_only:
                copy.value = b""
        return answer

    def holds(self, compare: kv_pb2.Compare) -> bool:
        """Return True if a comparison holds."""
        pair = self.pairs.get(compare.key)
        if compare.target == kv_pb2.Compare.COMPARE_TARGET_CREATE:
            return (0 if pair is None else pair.create_revision) == compare.create_revision
        return (0 if pair is None else pair.mod_revision) == compare.mod_revision

    def put(self, request: kv_pb2.PutRequest) -> None:
        """Write a key at the next revision."""
        now = self.revision + 1
        before = self.pairs.get(request.key)
        self._detach(before)
        pair = kv_pb2.KeyValue(
            key=request.key,
            value=request.value,
            lease=request.lease,
            mod_revision=now,
            create_revision=now if before is None else before.create_revision,
            version=1 if before is None else before.version + 1,
        )
        self.pairs[request.key] = pair
        if request.lease:
            self.leases[request.lease].keys.add(request.key)
        self.events.append(watch_pb2.Event(type=watch_pb2.Event.EVENT_TYPE_PUT, kv=pair))

    def delete(self, key: bytes) -> None:
        """Delete a key at the next revision."""
        self._detach(self.pairs.pop(key))
        gone = kv_pb2.KeyValue(key=key, mod_revision=self.revision + 1)
        self.events.append(watch_pb2.Event(type=watch_pb2.Event.EVENT_TYPE_DELETE, kv=gone))

    def _detach(self, pair: kv_pb2.KeyValue | None) -> None:
        if pair is not None and pair.lease in self.leases:
            self.leases[pair.lease].keys.discard(pair.key)

    def revoke(self, lease: int) -> list[bytes]:
        """End a lease, and delete its keys in one revision."""
        keys = sorted(self.leases[lease].keys)
        for key in keys:
            self.delete(key)
        del self.leases[lease]
        self.revision += bool(keys)
        return keys

    def compact(self, revision: int) -> None:
        """Drop the events up to a revision."""
        self.compacted = max(self.compacted, revision)
        self.events = [event for event in self.events if event.kv.mod_revision > self.compacted]


class Refusal(Exception):
    """An error that etcd returns."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class EtcdModel:
    """The etcd cluster."""

    def __init__(
        self,
        clockwork: Clockwork,
        chance: random.Random,
        note: Callable[..., None],
        on_commit: Callable[[Commit], None],
    ) -> None:
        """`on_commit`: called for every transaction and every end of a lease, at the moment of the commit."""
        self.clockwork = clockwork
        self.chance = chance
        self.note = note
        self.store = Store()
        self.term = 2
        self.leader = 0
        # Mean seconds until a majority agrees, and the chance that it takes much longer.
        self.latency = 0.002
        self.straggling = 0.0
        self.members: list[Member | None] = [None] * MEMBERS
        # Pairs of members that don't reach each other.
        self.cut: set[frozenset[int]] = set()
        self._on_commit = on_commit
        self._led_at = 0.0
        self._patience = chance.uniform(*_ELECTION)
        # By former leader: the time until which it believes that it leads, and its term.
        self._beliefs: dict[int, tuple[float, int]] = {}
        self._look()

    # ---- leadership

    def up(self, index: int) -> bool:
        """Return True if a member runs."""
        member = self.members[index]
        return member is not None and member.process.alive and not member.process.paused

    def reach(self, one: int, other: int) -> bool:
        """Return True if two members reach each other."""
        return self.up(one) and self.up(other) and frozenset((one, other)) not in self.cut

    def _has_majority(self, index: int) -> bool:
        return self.up(index) and sum(self.reach(index, each) for each in range(MEMBERS)) >= _MAJORITY

    @property
    def led(self) -> bool:
        """True if the leader has a majority."""
        return self._has_majority(self.leader)

    def in_touch(self, index: int) -> bool:
        """Return True if a member reaches a leader that has a majority."""
        return self.led and self.reach(index, self.leader)

    def stale_term(self, index: int) -> int:
        """Return the term of a reachable former leader that believes that it leads; 0: there is none."""
        for former, (until, term) in self._beliefs.items():
            if self.clockwork.now < until and self.reach(index, former):
                return term
        return 0

    def _look(self) -> None:
        now = self.clockwork.now
        self.clockwork.after(_LOOK, self._look)
        if self.led:
            self._led_at = now
            self._expire()
        elif now > self._led_at + self._patience:
            able = [index for index in range(MEMBERS) if self._has_majority(index)]
            if able:
                self._elect(self.chance.choice(able))
        for member in self.members:
            if member is not None:
                member.look()

    def changed(self) -> None:
        """Call it after members were cut off, paused or killed: the former leader may believe that it still leads."""
        if not self.led:
            self._beliefs[self.leader] = self.clockwork.now + _BELIEF, self.term

    def woke(self, index: int) -> None:
        """A member continues after a pause. If it was the leader, it believes that it still leads."""
        until, term = self._beliefs.get(index, (0.0, 0))
        if term:
            self._beliefs[index] = max(until, self.clockwork.now + 0.3), term

    def _elect(self, index: int) -> None:
        self.term += 1
        self.leader = index
        self._beliefs.pop(index, None)
        self._led_at = self.clockwork.now
        self._patience = self.chance.uniform(*_ELECTION)
        self.note("elected", index, self.term)
        for lease in self.store.leases.values():
            lease.ends = self.clockwork.now + lease.ttl

    def _expire(self) -> None:
        now = self.clockwork.now
        for number in [number for number, lease in self.store.leases.items() if lease.ends < now]:
            self.note("lease expired", f"{number:x}")
            self.end_lease(number)

    # ---- commits

    def submit(self, index: int, apply: Apply) -> asyncio.Future[Any]:
        """Submit a change to the majority; return a future of its result, which is set if the member learns of it."""
        member = self.members[index]
        assert member is not None, "who is asked is there"
        done = member.process.create_future()
        delay = self.chance.expovariate(1 / self.latency)
        if self.chance.random() < self.straggling:
            delay += self.chance.uniform(0.5, 6.0)
        self.clockwork.after(delay, self._agree, member, index, apply, done)
        return done

    def _agree(self, member: Member, index: int, apply: Apply, done: asyncio.Future[Any]) -> None:
        if not self.led:
            # The leader may have replicated it before it lost its majority: then the next leader may commit it.
            if self.chance.random() < 0.3:
                self.clockwork.after(self.chance.uniform(0.5, 3.0), self._agree, member, index, apply, done)
            return
        try:
            result = apply()
        except Refusal as refusal:
            result = refusal
        for each in self.members:
            if each is not None:
                each.look()
        if self.in_touch(index):
            member.process.call_soon(_settle, done, result)

    def transact(self, request: kv_pb2.TxnRequest) -> kv_pb2.TxnResponse:
        """Carry out a transaction."""
        store = self.store
        succeeded = all(store.holds(compare) for compare in request.compare)
        operations = request.success if succeeded else request.failure
        if max(len(request.compare), len(request.success), len(request.failure)) > 128:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        puts = [each.request_put for each in operations if each.HasField("request_put")]
        if puts and store.full:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
        if any(put.lease and put.lease not in store.leases for put in puts):
            raise Refusal(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        answer = kv_pb2.TxnResponse(succeeded=succeeded)
        before = dict(store.pairs)
        changed, deleted = False, []
        for operation in operations:
            response = answer.responses.add()
            if operation.HasField("request_put"):
                store.put(operation.request_put)
                response.response_put.SetInParent()
                changed = True
            elif operation.HasField("request_delete_range"):
                wanted = operation.request_delete_range
                for pair in store.select(wanted.key, wanted.range_end):
                    store.delete(pair.key)
                    deleted.append(pair.key)
                    changed = True
                response.response_delete_range.SetInParent()
            else:
                response.response_range.CopyFrom(store.read(operation.request_range))
        store.revision += changed
        if changed:
            self._on_commit(Commit(store.revision, puts, before, deleted))
        return answer

    def end_lease(self, number: int) -> None:
        """End a lease, if it exists."""
        if number in self.store.leases:
            keys = self.store.revoke(number)
            self._on_commit(Commit(self.store.revision, (), {}, keys))

    def grant(self, ttl: int) -> lease_pb2.LeaseGrantResponse:
        """Grant a lease of `ttl` seconds."""
        ttl = max(ttl, _SHORTEST_LEASE)
        number = self.chance.getrandbits(62) + 1
        self.store.leases[number] = _Lease(ttl, self.clockwork.now + ttl)
        return lease_pb2.LeaseGrantResponse(id=number, ttl=ttl)

    def prolong(self, number: int) -> int:
        """Renew a lease; return its time to live in seconds, 0: it has ended."""
        lease = self.store.leases.get(number)
        if lease is None:
            return 0
        lease.ends = self.clockwork.now + lease.ttl
        return lease.ttl


class _NoObserver:
    """An observer that does nothing."""

    def heard(self, call: ServerCall, message: Any) -> None:
        """See `wire.Observer`."""

    def told(self, call: ServerCall, message: Any) -> None:
        """See `wire.Observer`."""

    def answered(self, call: ServerCall, status: Status) -> None:
        """See `wire.Observer`."""


class Member:
    """One process of a member; it accepts connections."""

    def __init__(self, model: EtcdModel, index: int, process: Process) -> None:
        self.process = process
        self._model = model
        self._index = index
        # The revision up to which it knows the store.
        self._known = model.store.revision
        self._in_touch_at = model.clockwork.now
        # One event for each watch.
        self._news: dict[asyncio.Event, None] = {}
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        self._handlers: dict[str, Any] = {
            "/etcdserverpb.KV/Txn": unary(self._txn, kv_pb2.TxnRequest.FromString),
            "/etcdserverpb.KV/Range": unary(self._range, kv_pb2.RangeRequest.FromString),
            "/etcdserverpb.KV/Compact": unary(self._compact, kv_pb2.CompactionRequest.FromString),
            "/etcdserverpb.Lease/LeaseGrant": unary(self._grant, lease_pb2.LeaseGrantRequest.FromString),
            "/etcdserverpb.Lease/LeaseRevoke": unary(self._revoke, lease_pb2.LeaseRevokeRequest.FromString),
            "/etcdserverpb.Maintenance/Status": unary(self._status, maintenance_pb2.StatusRequest.FromString),
            "/etcdserverpb.Lease/LeaseKeepAlive": stream(
                self._keep_alive,
                lease_pb2.LeaseKeepAliveRequest.FromString,
                lease_pb2.LeaseKeepAliveResponse.SerializeToString,
            ),
            "/etcdserverpb.Watch/Watch": stream(
                self._watch, watch_pb2.WatchRequest.FromString, watch_pb2.WatchResponse.SerializeToString
            ),
        }

    def accept(self, connection: Connection, method: str) -> ServerCall:
        """Accept a call."""
        return ServerCall(connection, method, self._handlers[method], _NoObserver())

    def look(self) -> None:
        """Learn new commits, if the member reaches the leader."""
        if self._model.in_touch(self._index):
            self._in_touch_at = self._model.clockwork.now
            if self._known != self._model.store.revision:
                self._known = self._model.store.revision
                self._notify_watches()
        elif self._leaderless:
            self._notify_watches()

    def _notify_watches(self) -> None:
        for news in self._news:
            self.process.call_soon(news.set)

    @property
    def _leaderless(self) -> bool:
        return self._model.clockwork.now > self._in_touch_at + _ELECTION[1]

    async def _agreed(self, context: Any, apply: Apply) -> Any:
        """Return the encoded response of a request that needs the majority; aborts the call on an error."""
        if self._leaderless and not self._model.in_touch(self._index):
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, _LEADERLESS)
        try:
            async with asyncio.timeout(_REQUEST):
                result = await self._model.submit(self._index, apply)
        except TimeoutError:
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out")
        if isinstance(result, Refusal):
            await self._refuse(context, result.code, str(result))
        result.header.revision = self._model.store.revision
        result.header.raft_term = self._model.term
        return result.SerializeToString()

    async def _refuse(self, context: Any, code: grpc.StatusCode, text: str) -> None:
        await context.abort(code, text)

    async def _txn(self, request: kv_pb2.TxnRequest, context: Any) -> Any:
        return await self._agreed(context, lambda: self._model.transact(request))

    async def _range(self, request: kv_pb2.RangeRequest, context: Any) -> Any:
        store = self._model.store

        def read() -> kv_pb2.RangeResponse:
            if 0 < request.revision < store.revision:
                # Pages are read at one revision; past values are not kept here, see `_past`.
                return _past(store, request)
            return store.read(request)

        return await self._agreed(context, read)

    async def _compact(self, request: kv_pb2.CompactionRequest, context: Any) -> Any:
        def compact() -> kv_pb2.CompactionResponse:
            self._model.store.compact(request.revision)
            return kv_pb2.CompactionResponse()

        return await self._agreed(context, compact)

    async def _grant(self, request: lease_pb2.LeaseGrantRequest, context: Any) -> Any:
        return await self._agreed(context, lambda: self._model.grant(request.ttl))

    async def _revoke(self, request: lease_pb2.LeaseRevokeRequest, context: Any) -> Any:
        def revoke() -> lease_pb2.LeaseRevokeResponse:
            if request.id not in self._model.store.leases:
                raise Refusal(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
            self._model.end_lease(request.id)
            return lease_pb2.LeaseRevokeResponse()

        return await self._agreed(context, revoke)

    async def _status(self, request: maintenance_pb2.StatusRequest, context: Any) -> Any:
        return maintenance_pb2.StatusResponse(version="3.6.9", leader=1).SerializeToString()

    async def _keep_alive(self, requests: Any, context: Any) -> None:
        model = self._model
        async for request in requests:
            answer = lease_pb2.LeaseKeepAliveResponse(id=request.id)
            began = model.clockwork.now
            while True:
                stale = model.stale_term(self._index)
                if stale and not model.in_touch(self._index):
                    lease = model.store.leases.get(request.id)
                    answer.ttl = 0 if lease is None else lease.ttl
                    answer.header.raft_term = stale
                    break
                if model.in_touch(self._index):
                    await asyncio.sleep(model.chance.expovariate(1 / model.latency))
                    answer.header.raft_term = model.term
                    if model.in_touch(self._index):
                        answer.ttl = model.prolong(request.id)
                        break
                if model.clockwork.now > began + _REQUEST:
                    await self._refuse(context, grpc.StatusCode.UNAVAILABLE, _LEADERLESS)
                await asyncio.sleep(_LOOK)
            answer.header.revision = model.store.revision
            await context.write(answer)

    async def _watch(self, requests: Any, context: Any) -> None:
        reading: asyncio.Future[Any] | None = None
        wanted: watch_pb2.WatchCreateRequest | None = None
        following, waiting = 0, None
        news = asyncio.Event()
        self._news[news] = None
        try:
            while True:
                reading = reading or asyncio.ensure_future(anext(requests))
                waiting = waiting or asyncio.ensure_future(news.wait())
                await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if self._leaderless:
                    await self._refuse(context, grpc.StatusCode.UNAVAILABLE, _LEADERLESS)
                if reading.done():
                    try:
                        request = reading.result()
                    except StopAsyncIteration:
                        return
                    reading = None
                    if request.HasField("create_request"):
                        wanted = request.create_request
                        following = wanted.start_revision or self._known + 1
                        await context.write(self._response(created=True))
                    elif request.HasField("progress_request"):
                        await context.write(self._response(watch_id=-1))
                if waiting.done():
                    waiting = None
                    news.clear()
                if wanted is not None:
                    if following <= self._model.store.compacted:
                        await context.write(
                            self._response(canceled=True, compact_revision=self._model.store.compacted + 1)
                        )
                        return
                    following = await self._send_events(context, wanted, following)
        finally:
            del self._news[news]
            for each in (reading, waiting):
                if each is not None:
                    each.cancel()

    async def _send_events(self, context: Any, wanted: watch_pb2.WatchCreateRequest, following: int) -> int:
        known = self._known
        events = []
        for event in reversed(self._model.store.events):
            if event.kv.mod_revision < following:
                break
            inside = event.kv.key < wanted.range_end if wanted.range_end else event.kv.key == wanted.key
            if event.kv.mod_revision <= known and wanted.key <= event.kv.key and inside:
                events.append(event)
        events.reverse()
        if events:
            await context.write(self._response(events=events))
        return max(following, known + 1)

    def _response(self, **fields: Any) -> watch_pb2.WatchResponse:
        response = watch_pb2.WatchResponse(**fields)
        response.header.revision = self._known
        response.header.raft_term = self._model.term
        return response


def _past(store: Store, request: kv_pb2.RangeRequest) -> kv_pb2.RangeResponse:
    """Return a range at a revision; raise Refusal if it was compacted, or the range has changed since."""
    if request.revision < store.compacted:
        text = "etcdserver: mvcc: required revision has been compacted"
        raise Refusal(grpc.StatusCode.OUT_OF_RANGE, text)
    changed = {event.kv.key for event in store.events if event.kv.mod_revision > request.revision}
    if any(
        request.key <= key and (key < request.range_end or not request.range_end) for key in sorted(changed)
    ):
        # Past values are not kept: act as if they had just been compacted, which a reader must handle.
        text = "etcdserver: mvcc: required revision has been compacted"
        raise Refusal(grpc.StatusCode.OUT_OF_RANGE, text)
    return store.read(request)


def _settle(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)
