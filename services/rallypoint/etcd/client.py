"""The client of an etcd cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from rallypoint.etcd.cluster import EtcdChannel, Members
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.errors import Compacted, EtcdError, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.streams import renew, watch
from rallypoint.etcd.v1 import kv_pb2, lease_pb2, maintenance_pb2
from rallypoint.etcd.values import Change, KeyValue, Snapshot, Txn, TxnResult, from_pairs, from_txn, to_txn
from rallypoint.rpc.pace import Pace

# ---- Reading a range in pages of bearable size, all at one revision.


# Keys in the first page, of which nothing is known: 4 MiB with the largest values of a journal, 12 MiB with the largest
# that etcd takes by default. Later pages go by what came.
_FIRST_PAGE = 8
_LARGEST_PAGE = 4096
# What a page should have, so that one comes well within the time for an attempt (0.2 s at 25 MB/s) and nobody waits for
# its decoding.
_PAGE_BYTES = 4 * 1024 * 1024
# Reads whose revision is compacted between two pages begin anew, at a newer one.
_MOST_READS = 5


def next_page_size(size: int, keys: int, page_bytes: int) -> int:
    """How many keys to ask for next.

    Args:
        size: Keys that were asked for.
        keys: Keys that came, at least 1.
        page_bytes: Their size.
    """
    fitting = _PAGE_BYTES * keys // max(1, page_bytes)
    # No more than four times as many at once: the next values may be larger.
    return max(1, min(fitting, 4 * size, _LARGEST_PAGE))


class PageSizes:
    """How many keys to ask for, from page to page.

    Attributes:
        keys: Of the next page.
    """

    def __init__(self, first: int = _FIRST_PAGE) -> None:
        """`first`: keys of the first page."""
        self.keys = first
        # Keys ahead that did not come as one page, and how many of them to ask for at most.
        self._doubtful = 0
        self._most = first

    def came(self, keys: int, page_bytes: int) -> None:
        """A page of so many keys came, at least 1."""
        self._doubtful -= keys
        self.keys = next_page_size(self.keys, keys, page_bytes)
        if self._doubtful > 0:
            self.keys = min(self.keys, self._most)

    def lost(self) -> None:
        """The page did not come: behind small values, one of large values has a thousand times what was expected.

        No fraction of it is sure to come, and each that doesn't costs an attempt. So the next is a single key, the
        least there is, and from there pages grow by what comes. Where the large values begin isn't known: until all
        keys of the lost page are read, none has more than an eighth of it, or those before the large values would
        make pages grow until the next is lost in the same way, again and again.
        """
        self._doubtful, self._most = self.keys, max(1, self.keys // 8)
        self.keys = 1


async def read_pages(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    """Read all of a range.

    There is no bound for all of it, as there is none for what it holds; there is one for the time without any page.

    Raises:
        Compacted: The revision that the request names is gone.
        EtcdUnavailable: No member answered in time, not even with a single key.
        EtcdRefused: It is refused.
    """
    reads = 0
    while True:
        try:
            return await _read(members, request)
        except Compacted:
            reads += 1
            if request.revision or reads == _MOST_READS:
                raise


async def _read(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    page = kv_pb2.RangeRequest()
    page.CopyFrom(request)
    sizes = PageSizes() if request.range_end else PageSizes(1)
    pairs: list[KeyValue] = []
    # Seconds for a page of a single key; one of several gets those of an attempt.
    alone = members.request_timeout
    while True:
        page.limit = sizes.keys
        try:
            # What a member has, it can tell without a leader.
            response = await members.call_repeatedly(
                "/etcdserverpb.KV/Range",
                page,
                kv_pb2.RangeResponse,
                timeout=alone if page.limit == 1 else members.attempt_timeout,
                leader=not page.serializable,
            )
        except (EtcdRefused, EtcdUnavailable) as error:
            if page.limit == 1 or not _may_be_for_its_size(error):
                raise
            sizes.lost()
            # What is left: so, whoever waits for a cluster that is gone hears of it when any other request would say
            # so, unless an attempt may take more than half of a request's time.
            alone = max(members.attempt_timeout, members.request_timeout - members.attempt_timeout)
            continue
        # The first page says which revision all the others are read at.
        page.revision = page.revision or response.header.revision
        pairs += from_pairs(response.kvs)
        if not response.more or not response.kvs:
            return Snapshot(pairs, page.revision)
        page.key = response.kvs[-1].key + b"\0"
        sizes.came(len(response.kvs), response.ByteSize())
        alone = members.request_timeout


def _may_be_for_its_size(error: EtcdRefused | EtcdUnavailable) -> bool:
    """Whether a smaller page may come where this one didn't: a slow link and a member that hangs look the same."""
    return isinstance(error, EtcdUnavailable) or error.reason is Reason.TOO_LARGE


class EtcdClient:
    """Calls any member of the cluster that answers. An async context manager; close it when done."""

    def __init__(
        self, address: EtcdAddress, *, pace: Pace | None = None, request_timeout: float | None = None
    ) -> None:
        """Connects when first used.

        Args:
            address: Where the cluster is.
            pace: How time passes.
            request_timeout: Seconds that a request may take over all members, instead of the address's.

        Raises:
            TLSFileError: A TLS file is missing, unusable or does not match.
        """
        self.address = address
        timeout = address.request_timeout if request_timeout is None else request_timeout
        self.members = Members(address, pace or Pace(), timeout)

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def get(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        revision: int = 0,
        keys_only: bool = False,
        serializable: bool = False,
    ) -> Snapshot:
        """Read a key, or all from it up to and without `end`, at one revision, in as many pages as it takes.

        Args:
            key: The key, or the first.
            end: Behind the last (`prefix_end`); empty: the key alone.
            revision: To read at; 0: the newest, linearizably.
            keys_only: Leave the values out.
            serializable: Read what the member has, which may be old, but costs no round among members.

        Raises:
            Compacted: `revision` is gone.
            EtcdUnavailable: No member answered in time.
            EtcdRefused: The user may not read there, for example.
        """
        request = kv_pb2.RangeRequest(
            key=key, range_end=end, revision=revision, keys_only=keys_only, serializable=serializable
        )
        return await read_pages(self.members, request)

    async def transact(self, txn: Txn, *, timeout: float | None = None) -> TxnResult:
        """Send a transaction, once.

        Args:
            txn: What to do.
            timeout: Seconds, instead of the client's.

        Raises:
            EtcdUnavailable: The outcome is unknown, unless its `unsent` says otherwise: it may have been done,
                or be done later. Whether sending it again is safe, the caller must know.
            EtcdRefused: Nothing was done.
        """
        path = "/etcdserverpb.KV/Txn"
        return from_txn(await self.members.call_once(path, to_txn(txn), kv_pb2.TxnResponse, timeout=timeout))

    async def grant(self, ttl: int) -> tuple[int, float]:
        """Make a lease. One of which the answer is lost dies by itself.

        Args:
            ttl: Seconds, at least 1.

        Returns:
            The lease, and the seconds that it lives: more than asked for where that was too little.

        Raises:
            EtcdUnavailable: No member answered in time.
            EtcdRefused: It is refused.
        """
        request = lease_pb2.LeaseGrantRequest(ttl=ttl)
        path = "/etcdserverpb.Lease/LeaseGrant"
        response = await self.members.call_repeatedly(path, request, lease_pb2.LeaseGrantResponse)
        if response.error:
            raise EtcdRefused(Reason.INVALID, response.error)
        return response.id, float(response.ttl)

    async def keep_alive(self, lease: int) -> float:
        """Prolong a lease, once, at one member; the seconds that it lives from when this was sent. 0: it has ended.

        Raises:
            EtcdUnavailable: No answer; it may have been prolonged or not.
            EtcdRefused: It is refused.
        """
        connection = self.members.current
        try:
            return (await renew(self.members, connection, lease, self.members.attempt_timeout)).ttl
        except EtcdUnavailable:
            self.members.move_on(connection)
            raise

    async def term(self, *, at: EtcdChannel | None = None, timeout: float | None = None) -> int:
        """The term of the leader whom a majority of the members obeys now, read linearizably.

        Args:
            at: The member to ask, once; None: whichever answers.
            timeout: Seconds, instead of the client's.

        Raises:
            EtcdUnavailable: No member answered in time.
        """
        # A key of ours, as a user may have no right to see others; it needn't be there.
        request = kv_pb2.RangeRequest(key=f"{self.address.prefix}/".encode(), count_only=True)
        path, answer = "/etcdserverpb.KV/Range", kv_pb2.RangeResponse
        if at is None:
            return (
                await self.members.call_repeatedly(path, request, answer, timeout=timeout)
            ).header.raft_term
        seconds = self.members.request_timeout if timeout is None else timeout
        return (await self.members.call(at, path, request, answer, timeout=seconds)).header.raft_term

    async def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        """End a lease and delete its keys. One that has ended already is no error.

        Args:
            lease: The lease.
            timeout: Seconds, instead of the client's.

        Raises:
            EtcdUnavailable: No member answered in time; it may have ended or not.
        """
        request = lease_pb2.LeaseRevokeRequest(id=lease)
        path = "/etcdserverpb.Lease/LeaseRevoke"
        try:
            await self.members.call_repeatedly(path, request, lease_pb2.LeaseRevokeResponse, timeout=timeout)
        except EtcdRefused as error:
            if error.reason is not Reason.LEASE_NOT_FOUND:
                raise

    def watch(self, key: bytes, end: bytes, revision: int) -> AsyncGenerator[Sequence[Change], None]:
        """The changes of a key, or of all from it up to and without `end`, as they are made.

        It survives members that fail: nothing is left out, nothing comes twice, and no revision comes in two parts.
        It never ends by itself. Whoever stops early closes it (`contextlib.aclosing`).

        Args:
            key: The key, or the first.
            end: Behind the last; empty: the key alone.
            revision: The first whose changes are told: `snapshot.revision + 1` after a `get`. 0: from now on.

        Raises:
            Compacted: Changes that were to be told are gone: read everything anew, and watch from there.
            EtcdRefused: The user may not read there, for example.
        """
        return watch(self.members, key, end, revision)

    async def compact(self, revision: int) -> None:
        """Forget what was before a revision, for all users of the cluster. One that is gone already is no error.

        Raises:
            EtcdUnavailable: No member answered in time.
            EtcdRefused: The user may not, for example.
        """
        request = kv_pb2.CompactionRequest(revision=revision)
        with suppress(Compacted):
            await self.members.call_repeatedly("/etcdserverpb.KV/Compact", request, kv_pb2.CompactionResponse)

    async def versions(self) -> dict[str, str]:
        """The version of each member that answers, by its endpoint; empty where our user may not ask."""

        return {where: status.version for where, status in (await statuses(self)).items()}

    async def close(self) -> None:
        """End every call, watch and connection."""
        await self.members.close()


# ---- What the members of a cluster say of themselves: too old, nearly full, in trouble.


OLDEST = (3, 4, 0)
"""What we can work with at all."""

RECOMMENDED = (3, 6, 9)
"""Older ones have known faults, which we work around or which are rare."""

# etcd's default for --quota-backend-bytes, which servers before 3.6 don't tell.
_DEFAULT_QUOTA = 2 * 1024**3
_NEARLY_FULL = 0.8


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member. `version` empty: our user may not ask; `quota` 0: it doesn't say; `alarms` are for people."""

    version: str
    db_size: int
    quota: int
    alarms: tuple[str, ...]
    learner: bool


async def statuses(client: EtcdClient) -> dict[str, MemberStatus]:
    """Each member that answers, by its endpoint.

    Raises:
        EtcdUnavailable: None does.
        EtcdRefused: What answers is no etcd, or won't let us in.
    """
    members = client.members
    asked = [_status(client, index) for index in range(len(members.connections))]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[str, MemberStatus] = {}
    failure: EtcdError | None = None
    for connection, answer in zip(members.connections, answers, strict=True):
        if isinstance(answer, MemberStatus):
            found[connection.where] = answer
        elif isinstance(answer, EtcdError):
            failure = answer if failure is None or isinstance(answer, EtcdRefused) else failure
        else:
            raise answer
    if not found:
        assert failure is not None
        raise failure
    return found


async def _status(client: EtcdClient, index: int) -> MemberStatus:
    members = client.members
    connection = members.connections[index]
    await connection.ready(members.attempt_timeout)
    try:
        response = await members.call(
            connection,
            "/etcdserverpb.Maintenance/Status",
            maintenance_pb2.StatusRequest(),
            maintenance_pb2.StatusResponse,
            timeout=members.attempt_timeout,
            # A member that has none still knows its version.
            leader=False,
        )
    except EtcdRefused as error:
        if error.reason is not Reason.PERMISSION_DENIED:
            raise
        # Late releases of 3.5 answer that to root only.
        return MemberStatus("", 0, 0, (), learner=False)
    alarms = tuple(text.strip() for text in response.errors if "alarm" in text)
    return MemberStatus(
        response.version, response.db_size, response.db_size_quota, alarms, learner=response.is_learner
    )


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The numbers of a version like 3.6.0-rc.1; None: it is none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def advice(found: dict[str, MemberStatus]) -> list[str]:
    """What an operator should be told of the members, one line each.

    Raises:
        EtcdRefused: One is older than what we can work with.
    """
    lines: list[str] = []
    for where, status in found.items():
        version = parse_version(status.version)
        if version is not None and version < OLDEST:
            raise EtcdRefused(
                Reason.NOT_ETCD, f"{where}: etcd {status.version} is too old: 3.4 or newer is needed"
            )
        if not status.version:
            lines.append(
                f"{where}: this user may not ask etcd for its version: see that it is 3.6.9 or newer"
            )
        elif version is None or version < RECOMMENDED:
            lines.append(
                f"{where}: etcd {status.version} is older than recommended: upgrade to 3.6.9 or newer"
            )
        quota = status.quota or _DEFAULT_QUOTA
        if status.db_size > _NEARLY_FULL * quota:
            lines.append(
                f"{where}: the database has {status.db_size >> 20} MiB of {quota >> 20} MiB, at which etcd takes no"
                " more writes: compact and defragment it, or raise --quota-backend-bytes"
            )
        if status.learner:
            lines.append(f"{where}: this member is a learner, which answers few requests: name a voting one")
        lines.extend(f"{where}: etcd has raised an alarm: {alarm}" for alarm in status.alarms)
    return lines


async def check_versions(client: EtcdClient) -> list[str]:
    """Look at every member that answers; what an operator should be told, one line each.

    Raises:
        EtcdUnavailable: None answers.
        EtcdRefused: One is too old, or won't let us in.
    """
    return advice(await statuses(client))
