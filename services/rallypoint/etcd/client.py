"""The client of an etcd cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType

from rallypoint.etcd.address import EtcdAddress
from rallypoint.etcd.codec import from_txn, to_txn
from rallypoint.etcd.connection import Connection
from rallypoint.etcd.errors import Compacted, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.leases import renew
from rallypoint.etcd.members import Members
from rallypoint.etcd.pages import read_pages
from rallypoint.etcd.v1 import kv_pb2, lease_pb2
from rallypoint.etcd.values import Change, Snapshot, Txn, TxnResult
from rallypoint.etcd.watch import watch
from rallypoint.rpc.selector import Pace


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
        return from_txn(await self.members.ask_once(path, to_txn(txn), kv_pb2.TxnResponse, timeout=timeout))

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
        response = await self.members.ask(path, request, lease_pb2.LeaseGrantResponse)
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

    async def term(self, *, at: Connection | None = None, timeout: float | None = None) -> int:
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
            return (await self.members.ask(path, request, answer, timeout=timeout)).header.raft_term
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
            await self.members.ask(path, request, lease_pb2.LeaseRevokeResponse, timeout=timeout)
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
            await self.members.ask("/etcdserverpb.KV/Compact", request, kv_pb2.CompactionResponse)

    async def versions(self) -> dict[str, str]:
        """The version of each member that answers, by its endpoint; empty where our user may not ask."""
        from rallypoint.etcd.version import statuses  # noqa: PLC0415

        return {where: status.version for where, status in (await statuses(self)).items()}

    async def close(self) -> None:
        """End every call, watch and connection."""
        await self.members.close()
