"""Refusals of a real server, and the reasons that we derive from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from rallypoint.etcd.client import EtcdClient, check_versions
from rallypoint.etcd.errors import (
    Compacted,
    EtcdError,
    EtcdRefused,
    EtcdUnavailable,
    Reason,
    TokenRefused,
    error_for,
)
from rallypoint.etcd.values import Delete, Put, Txn
from support.etcd_server import PATIENT, etcd_cluster

MEBIBYTE = 1024 * 1024


async def refusal(client: EtcdClient, txn: Txn) -> Reason:
    with pytest.raises(EtcdRefused) as refused:
        await client.transact(txn)
    return refused.value.reason


async def test_a_request_beyond_the_servers_limits_is_refused(client: EtcdClient) -> None:
    """Too many bytes, by a little and by much; too many operations; and a key written twice, which is our mistake."""
    assert await refusal(client, Txn([], [Put(b"a", bytes(MEBIBYTE + MEBIBYTE // 2))])) is Reason.TOO_LARGE
    assert await refusal(client, Txn([], [Put(b"a", bytes(8 * MEBIBYTE))])) is Reason.TOO_LARGE
    many = Txn([], [Put(b"%d" % number, b"") for number in range(129)])
    assert await refusal(client, many) is Reason.TOO_MANY_OPERATIONS
    assert await refusal(client, Txn([], [Put(b"a", b""), Put(b"a", b"")])) is Reason.INVALID


async def test_a_full_database_is_reported_and_can_be_emptied(
    connect: Callable[..., EtcdClient], tmp_path: Path
) -> None:
    """Writes are refused with NO_SPACE, the alarm is reported, and deletes still work."""
    with etcd_cluster(tmp_path, extra=["--quota-backend-bytes", str(20 * MEBIBYTE)]) as cluster:
        client = connect(f"{cluster.url}?{PATIENT}")
        reason = None
        for number in range(60):
            try:
                await client.transact(Txn([], [Put(b"%d" % number, bytes(MEBIBYTE))]))
            except EtcdRefused as error:
                reason = error.reason
                break
        assert reason is Reason.NO_SPACE
        advice = "\n".join(await check_versions(client))
        assert "has raised an alarm" in advice
        assert "NOSPACE" in advice
        assert (await client.transact(Txn([], [Delete(b"1")]))).succeeded
        assert len((await client.get(b"0")).pairs) == 1


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("UNAVAILABLE", "etcdserver: leader changed", EtcdUnavailable),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to connection lost", EtcdUnavailable),
        (
            "UNAVAILABLE",
            "etcdserver: request timed out, possibly due to previous leader failure",
            EtcdUnavailable,
        ),
        ("UNAVAILABLE", "etcdserver: no leader", EtcdUnavailable),
        ("FAILED_PRECONDITION", "etcdserver: not leader", EtcdUnavailable),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", EtcdUnavailable),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision", EtcdUnavailable),
        ("UNKNOWN", "raft: stopped", EtcdUnavailable),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", EtcdUnavailable),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Compacted),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", TokenRefused),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", TokenRefused),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", TokenRefused),
        ("DATA_LOSS", "etcdserver: corrupt cluster", Reason.CORRUPT),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", Reason.NOT_ETCD),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Reason.PERMISSION_DENIED),
        (
            "INVALID_ARGUMENT",
            "etcdserver: authentication failed, invalid user ID or password",
            Reason.UNAUTHENTICATED,
        ),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Reason.NO_SPACE),
        ("NOT_FOUND", "etcdserver: requested lease not found", Reason.LEASE_NOT_FOUND),
        ("INVALID_ARGUMENT", "etcdserver: key is not provided", Reason.INVALID),
    ],
)
def test_a_status_becomes_an_error_with_its_remedy(
    code: str, text: str, expected: type[EtcdError] | Reason
) -> None:
    """Retry, get another token, read again, or give up for a reason; and the text names the member."""
    error = error_for(grpc.StatusCode[code], text, "a:2379")
    if isinstance(expected, Reason):
        assert isinstance(error, EtcdRefused)
        assert error.reason is expected
    else:
        assert type(error) is expected
    if not isinstance(error, Compacted):
        assert str(error) == f"a:2379: {text}"
