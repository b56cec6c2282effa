"""The client of an etcd cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from rallypoint.etcd.cluster import EtcdChannel, Members
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.errors import Compacted, EtcdError, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.streams import renew, watch
from rallypoint.etcd.v1 import kv_pb2, lease_pb2, maintenance_pb2
from rallypoint.etcd.values import Change, KeyValue, Snapshot, Txn, TxnResult, from_pairs, from_txn, to_txn
from rallypoint.rpc.pace import Pace

# ---- Reading a range in pages of limited size, all at one revision.


# Keys in the first page, whose values have an unknown size: 4 MiB with the largest values of a journal, 12 MiB with the
# largest that etcd accepts by default. Later pages depend on the size of the earlier ones.
_FIRST_PAGE = 8
_LARGEST_PAGE = 4096
# Target size of a page, so that it arrives well within the timeout of an attempt (0.2 s at 25 MB/s) and its decoding
# delays nothing.
_PAGE_BYTES = 4 * 1024 * 1024
# Reads whose revision is compacted between two pages begin again, at a newer one.
_MOST_READS = 5


def next_page_size(size: int, keys: int, page_bytes: int) -> int:
    """Return how many keys to request next.

    Args:
        size: Keys that were requested.
        keys: Keys received, at least 1.
        page_bytes: Their size.
    """
    fitting = _PAGE_BYTES * keys // max(1, page_bytes)
    # No more than four times as many at once: the next values may be larger.
    return max(1, min(fitting, 4 * size, _LARGEST_PAGE))


class PageSizes:
    """The number of keys to request, from page to page.

    Attributes:
        keys: Number of keys of the next page.
    """

    def __init__(self, first: int = _FIRST_PAGE) -> None:
        """`first`: keys of the first page."""
        self.keys = first
        # Keys ahead that could not be read as one page, and how many of them to request at most.
        self._doubtful = 0
        self._most = first

    def came(self, keys: int, page_bytes: int) -> None:
        """Record a page of so many keys, at least 1."""
        self._doubtful -= keys
        self.keys = next_page_size(self.keys, keys, page_bytes)
        if self._doubtful > 0:
            self.keys = min(self.keys, self._most)

    def lost(self) -> None:
        """Record a page that did not arrive: behind small values, large ones have a thousand times the expected size.

        No fraction of it is sure to arrive, and each failure costs an attempt. So the next page is a single key, the
        minimum, and from there pages grow with the received sizes. Where the large values begin is not known: until
        all keys of the lost page are read, no page has more than an eighth of it, or the keys before the large values
        would make pages grow until the next is lost in the same way, again and again.
        """
        self._doubtful, self._most = self.keys, max(1, self.keys // 8)
        self.keys = 1


async def read_pages(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    """Read all of a range.

    The whole read has no time limit, because its size has none; the time without any page has one.

    Raises:
        Compacted: etcd compacts each revision while it is read.
        EtcdUnavailable: No member replied in time, not even with a single key.
        EtcdRefused: etcd refused the request.
    """
    reads = 0
    while True:
        try:
            return await _read(members, request)
        except Compacted:
            reads += 1
            if reads == _MOST_READS:
                raise


async def _read(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    page = kv_pb2.RangeRequest()
    page.CopyFrom(request)
    sizes = PageSizes() if request.range_end else PageSizes(1)
    pairs: list[KeyValue] = []
    # Timeout in seconds for a page of a single key; one of several has that of an attempt.
    alone = members.request_timeout
    while True:
        page.limit = sizes.keys
        try:
            response = await members.request(
                "/etcdserverpb.KV/Range",
                page,
                kv_pb2.RangeResponse,
                timeout=alone if page.limit == 1 else members.attempt_timeout,
            )
        except (EtcdRefused, EtcdUnavailable) as error:
            if page.limit == 1 or not _may_be_for_its_size(error):
                raise
            sizes.lost()
            # The remaining time: so a caller of a lost cluster gets the error as early as with any other request,
            # unless an attempt may take more than half of a request's time.
            alone = max(members.attempt_timeout, members.request_timeout - members.attempt_timeout)
            continue
        # The first page fixes the revision of all others.
        page.revision = page.revision or response.header.revision
        pairs += from_pairs(response.kvs)
        if not response.more or not response.kvs:
            return Snapshot(pairs, page.revision)
        page.key = response.kvs[-1].key + b"\0"
        sizes.came(len(response.kvs), response.ByteSize())
        alone = members.request_timeout


def _may_be_for_its_size(error: EtcdRefused | EtcdUnavailable) -> bool:
    """True if a smaller page may arrive after this failure: a slow link and a member that hangs look the same."""
    return isinstance(error, EtcdUnavailable) or error.reason is Reason.TOO_LARGE


class EtcdClient:
    """Calls any member of the cluster that replies. An async context manager; close it when done."""

    def __init__(self, address: EtcdAddress, *, pace: Pace | None = None) -> None:
        """Create a client; it connects when first used.

        Raises:
            TLSFileError: A TLS file is missing, unusable or does not match.
        """
        self.address = address
        self.members = Members(address, pace or Pace())

    async def __aenter__(self) -> EtcdClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def get(self, key: bytes, end: bytes = b"", *, keys_only: bool = False) -> Snapshot:
        """Read a key, or all from it up to, and excluding, `end`, at one revision, the newest; linearizably.

        Args:
            key: The key, or the first.
            end: End of the range, exclusive (`prefix_end`); empty: the key alone.
            keys_only: Leave the values out.

        Raises:
            Compacted: etcd compacts each revision while it is read.
            EtcdUnavailable: No member replied in time.
            EtcdRefused: etcd refused it, for example because the user may not read there.
        """
        request = kv_pb2.RangeRequest(key=key, range_end=end, keys_only=keys_only)
        return await read_pages(self.members, request)

    async def transact(self, txn: Txn) -> TxnResult:
        """Send a transaction, once.

        Raises:
            EtcdUnavailable: The outcome is unknown, unless `unsent` is set: it may have been done, or be done later.
                The caller must know if sending it again is safe.
            EtcdRefused: Nothing was done.
        """
        path = "/etcdserverpb.KV/Txn"
        answer = kv_pb2.TxnResponse
        return from_txn(await self.members.request(path, to_txn(txn), answer, once=True))

    async def grant(self, ttl: int) -> tuple[int, float]:
        """Create a lease. If the reply is lost, the lease expires by itself.

        Args:
            ttl: Seconds, at least 1.

        Returns:
            The lease, and its lifetime in seconds: more than requested if that was too little.

        Raises:
            EtcdUnavailable: No member replied in time.
            EtcdRefused: etcd refused it.
        """
        request = lease_pb2.LeaseGrantRequest(ttl=ttl)
        path = "/etcdserverpb.Lease/LeaseGrant"
        response = await self.members.request(path, request, lease_pb2.LeaseGrantResponse)
        if response.error:
            raise EtcdRefused(Reason.INVALID, response.error)
        return response.id, float(response.ttl)

    async def keep_alive(self, lease: int) -> float:
        """Renew a lease, once, at one member; return its lifetime in seconds from when this was sent. 0: it has ended.

        Raises:
            EtcdUnavailable: No reply; it may have been renewed or not.
            EtcdRefused: etcd refused it.
        """
        connection = self.members.current
        try:
            return (await renew(self.members, connection, lease, self.members.attempt_timeout)).ttl
        except EtcdUnavailable:
            self.members.move_on(connection)
            raise

    async def term(self, *, at: EtcdChannel | None = None, timeout: float | None = None) -> int:
        """Return the term of the leader that a majority of the members follows now, read linearizably.

        Args:
            at: The member to call, once; None: any that replies.
            timeout: Seconds, instead of the client's.

        Raises:
            EtcdUnavailable: No member replied in time.
        """
        # A key of ours, because a user may have no right to read others; it need not exist.
        request = kv_pb2.RangeRequest(key=f"{self.address.prefix}/".encode(), count_only=True)
        path, answer = "/etcdserverpb.KV/Range", kv_pb2.RangeResponse
        if at is None:
            return (await self.members.request(path, request, answer, timeout=timeout)).header.raft_term
        seconds = self.members.request_timeout if timeout is None else timeout
        return (await self.members.call(at, path, request, answer, timeout=seconds)).header.raft_term

    async def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        """End a lease and delete its keys. One that has ended already is no error.

        Args:
            lease: The lease.
            timeout: Seconds, instead of the client's.

        Raises:
            EtcdUnavailable: No member replied in time; it may have ended or not.
        """
        request = lease_pb2.LeaseRevokeRequest(id=lease)
        path = "/etcdserverpb.Lease/LeaseRevoke"
        try:
            await self.members.request(path, request, lease_pb2.LeaseRevokeResponse, timeout=timeout)
        except EtcdRefused as error:
            if error.reason is not Reason.LEASE_NOT_FOUND:
                raise

    def watch(self, key: bytes, end: bytes, revision: int) -> AsyncGenerator[Sequence[Change], None]:
        """Return the changes of a key, or of all from it up to, and excluding, `end`, as they are made.

        It survives members that fail: no change is left out or repeated, and no revision is split in two.
        It never ends by itself. To stop early, close it (`contextlib.aclosing`).

        Args:
            key: The key, or the first.
            end: End of the range, exclusive; empty: the key alone.
            revision: The first revision to return: `snapshot.revision + 1` after a `get`.

        Raises:
            Compacted: Changes that are still needed were compacted: read everything again, and watch from there.
            EtcdRefused: etcd refused it, for example because the user may not read there.
        """
        return watch(self.members, key, end, revision)

    async def close(self) -> None:
        """End every call, watch and connection."""
        await self.members.close()


# ---- Status of the members of a cluster: too old, nearly full, with alarms.


OLDEST = (3, 4, 0)
"""The oldest version that works at all."""

RECOMMENDED = (3, 6, 9)
"""Older versions have known faults, which are rare or have workarounds here."""

# etcd's default for --quota-backend-bytes, which servers before 3.6 do not report.
_DEFAULT_QUOTA = 2 * 1024**3
_NEARLY_FULL = 0.8


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member. `version` empty: the user has no right to it; `quota` 0: not reported; `alarms` are for people."""

    version: str
    db_size: int
    quota: int
    alarms: tuple[str, ...]
    learner: bool


async def statuses(client: EtcdClient) -> dict[str, MemberStatus]:
    """Return the status of each member that replies, by its endpoint.

    Raises:
        EtcdUnavailable: No member replied.
        EtcdRefused: The server is not etcd, or refused access.
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
            # A member without a leader still knows its version.
            leader=False,
        )
    except EtcdRefused as error:
        if error.reason is not Reason.PERMISSION_DENIED:
            raise
        # Late releases of 3.5 return the status to root only.
        return MemberStatus("", 0, 0, (), learner=False)
    alarms = tuple(text.strip() for text in response.errors if "alarm" in text)
    return MemberStatus(
        response.version, response.db_size, response.db_size_quota, alarms, learner=response.is_learner
    )


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return the numbers of a version like 3.6.0-rc.1; None: it is not a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def advice(found: dict[str, MemberStatus]) -> list[str]:
    """Return warnings about the members for an operator, one line each.

    Raises:
        EtcdRefused: A member is older than the oldest version that works.
    """
    lines: list[str] = []
    for where, status in found.items():
        version = parse_version(status.version)
        if version is not None and version < OLDEST:
            raise EtcdRefused(
                Reason.NOT_ETCD, f"{where}: etcd {status.version} is too old: 3.4 or newer is needed"
            )
        if not status.version:
            lines.append(f"{where}: this user may not read etcd's version: check that it is 3.6.9 or newer")
        elif version is None or version < RECOMMENDED:
            lines.append(
                f"{where}: etcd {status.version} is older than recommended: upgrade to 3.6.9 or newer"
            )
        quota = status.quota or _DEFAULT_QUOTA
        if status.db_size > _NEARLY_FULL * quota:
            lines.append(
                f"{where}: the database has {status.db_size >> 20} MiB of {quota >> 20} MiB, at which etcd accepts no"
                " more writes: compact and defragment it, or raise --quota-backend-bytes"
            )
        if status.learner:
            lines.append(f"{where}: this member is a learner, which serves few requests: name a voting one")
        lines.extend(f"{where}: etcd has raised an alarm: {alarm}" for alarm in status.alarms)
    return lines


async def check_versions(client: EtcdClient) -> list[str]:
    """Check every member that replies; return warnings for an operator, one line each.

    Raises:
        EtcdUnavailable: No member replied.
        EtcdRefused: A member is too old, or refused access.
    """
    return advice(await statuses(client))
