"""Errors of etcd: unavailable, refused for a reason, or compacted."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import grpc
import grpc.aio


class EtcdError(Exception):
    """A request to etcd failed, or its outcome is unknown."""


class EtcdUnavailable(EtcdError):
    """No reply, or one that permits a retry.

    Attributes:
        unsent: True if nothing was done for certain. Otherwise a request that changes something may have had its
            effect, or may still have it.
    """

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent


class Reason(StrEnum):
    """The reason why etcd refuses a request."""

    TOO_LARGE = "TOO_LARGE"
    """The request has more bytes than the server accepts (--max-request-bytes, 1.5 MiB)."""
    TOO_MANY_OPERATIONS = "TOO_MANY_OPERATIONS"
    """The transaction has more operations than the server accepts (--max-txn-ops, 128)."""
    NO_SPACE = "NO_SPACE"
    """The server's database is full (--quota-backend-bytes): it only reads and deletes now."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The user may not access these keys."""
    UNAUTHENTICATED = "UNAUTHENTICATED"
    """No user was given, or the password is wrong."""
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    """The lease has ended."""
    CORRUPT = "CORRUPT"
    """The members' databases differ from each other: the server accepts no requests."""
    NOT_ETCD = "NOT_ETCD"
    """The server is not etcd, or older than 3.4."""
    INVALID = "INVALID"
    """Any other refusal: a mistake of ours."""


REMEDIES: Mapping[Reason, str] = {
    Reason.NO_SPACE: "compact and defragment etcd, then `etcdctl alarm disarm`, or raise its --quota-backend-bytes",
    Reason.TOO_LARGE: "raise etcd's --max-request-bytes to 1572864, its default, or more",
    Reason.TOO_MANY_OPERATIONS: "raise etcd's --max-txn-ops to 128, its default, or more",
    Reason.PERMISSION_DENIED: "grant the user readwrite on all keys with the prefix of the etcd URL",
    Reason.UNAUTHENTICATED: "give a user and password that etcd knows",
    Reason.CORRUPT: "repair the cluster: see etcd's documentation on data corruption",
}
"""The action of an operator after a refusal, if there is one."""


class EtcdRefused(EtcdError):
    """etcd refuses a request, and would refuse it again. Nothing was done."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Compacted(EtcdError):
    """The requested old revision is compacted: read everything again.

    Attributes:
        revision: The oldest that still exists; 0 if the server did not report it.
    """

    def __init__(self, revision: int) -> None:
        since = f": its data begin at revision {revision}" if revision else ""
        super().__init__(f"etcd has compacted the requested revision{since}")
        self.revision = revision


class ClientClosed(EtcdError):
    """This process closed the client."""

    def __init__(self) -> None:
        super().__init__("the client of etcd is closed")


class TokenRefused(EtcdError):
    """A token is not accepted, or is missing. Nothing was done. With another token, the same call may succeed.

    Tokens expire, and are lost when a member restarts.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def final(self) -> EtcdRefused:
        """Return the error to raise if there is no other token."""
        return EtcdRefused(self.reason, str(self))


# Parts of etcd's error texts that all versions from 3.4 to 3.6 share.
_REFUSALS: tuple[tuple[str, Reason], ...] = (
    ("request is too large", Reason.TOO_LARGE),
    ("received message larger than max", Reason.TOO_LARGE),
    ("sent message larger than max", Reason.TOO_LARGE),
    ("too many operations", Reason.TOO_MANY_OPERATIONS),
    ("database space exceeded", Reason.NO_SPACE),
    ("permission denied", Reason.PERMISSION_DENIED),
    ("authentication failed", Reason.UNAUTHENTICATED),
    ("requested lease not found", Reason.LEASE_NOT_FOUND),
    ("corrupt cluster", Reason.CORRUPT),
)

# The last: the call had no token, because none was needed before.
_TOKEN_GONE = ("invalid auth token", "auth store is old", "user name is empty")

# Another member may succeed, or the same one soon.
_TRY_AGAIN = ("no leader", "not leader", "too many requests", "future revision")

_REFUSED_CODES: dict[grpc.StatusCode, Reason] = {
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_ETCD,
    grpc.StatusCode.DATA_LOSS: Reason.CORRUPT,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: Reason.INVALID,
    grpc.StatusCode.NOT_FOUND: Reason.INVALID,
    grpc.StatusCode.OUT_OF_RANGE: Reason.INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.INVALID,
    grpc.StatusCode.ALREADY_EXISTS: Reason.INVALID,
}


def error_for(code: grpc.StatusCode, text: str, where: str) -> EtcdError:
    """Return the error for a call's status.

    Args:
        code: Of the status; any code that is not a refusal means a broken connection, or a server in
            trouble.
    """
    lowered = text.lower()
    message = f"{where}: {text or code.name}"
    if any(words in lowered for words in _TOKEN_GONE):
        return TokenRefused(Reason.UNAUTHENTICATED, message)
    if any(words in lowered for words in _TRY_AGAIN):
        return EtcdUnavailable(message)
    if "has been compacted" in lowered:
        return Compacted(0)
    for words, reason in _REFUSALS:
        if words in lowered:
            return EtcdRefused(reason, message)
    if code in _REFUSED_CODES:
        return EtcdRefused(_REFUSED_CODES[code], message)
    return EtcdUnavailable(message)


# gRPC's text for a request that it could not send on a stream. The server's reason for ending the stream, if that
# is the cause, had not arrived yet, and cannot be obtained any more.
_NOT_SENT = "internal error from core"


def of_call(error: grpc.aio.AioRpcError, where: str) -> EtcdError:
    """Return the error for a call that failed."""
    text = error.details() or ""
    if error.code() is grpc.StatusCode.INTERNAL and text.lower() == _NOT_SENT:
        return EtcdUnavailable(
            f"{where}: the stream ended before the request was sent: the member has no leader, or is lost"
        )
    return error_for(error.code(), text, where)
