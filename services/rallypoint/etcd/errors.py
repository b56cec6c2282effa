"""What goes wrong with etcd: to try again, refused for a reason, or too late."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import grpc
import grpc.aio


class EtcdError(Exception):
    """etcd couldn't do, or didn't do, what it was asked to."""


class EtcdUnavailable(EtcdError):
    """No answer, or one that says to try again.

    Attributes:
        unsent: It is certain that nothing was done. Otherwise a request that changes something may have had its
            effect, or may still have it.
    """

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent


class Reason(StrEnum):
    """Why etcd refuses a request."""

    TOO_LARGE = "TOO_LARGE"
    """The request has more bytes than the server takes (--max-request-bytes, 1.5 MiB)."""
    TOO_MANY_OPERATIONS = "TOO_MANY_OPERATIONS"
    """The transaction has more operations than the server takes (--max-txn-ops, 128)."""
    NO_SPACE = "NO_SPACE"
    """The server's database is full (--quota-backend-bytes): it only reads and deletes now."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The user may not touch these keys."""
    UNAUTHENTICATED = "UNAUTHENTICATED"
    """No user was given, or the password is wrong."""
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    """The lease has ended."""
    CORRUPT = "CORRUPT"
    """The members' databases differ from each other: the server takes no requests."""
    NOT_ETCD = "NOT_ETCD"
    """What answers is no etcd server, or one before 3.4."""
    INVALID = "INVALID"
    """Anything else that the server won't do: a mistake of ours."""


REMEDIES: Mapping[Reason, str] = {
    Reason.NO_SPACE: "compact and defragment etcd, then `etcdctl alarm disarm`, or raise its --quota-backend-bytes",
    Reason.TOO_LARGE: "raise etcd's --max-request-bytes to 1572864, its default, or more",
    Reason.TOO_MANY_OPERATIONS: "raise etcd's --max-txn-ops to 128, its default, or more",
    Reason.PERMISSION_DENIED: "grant the user readwrite on all keys with the prefix of the etcd URL",
    Reason.UNAUTHENTICATED: "give a user and password that etcd knows",
    Reason.CORRUPT: "mend the cluster: see etcd's documentation on data corruption",
}
"""What an operator can do about a refusal, where there is something."""


class EtcdRefused(EtcdError):
    """etcd refuses, and would again. Nothing was done.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Compacted(EtcdError):
    """What was asked for at an old revision is gone: read everything anew.

    Attributes:
        revision: The oldest that is still there; 0 if the server didn't say.
    """

    def __init__(self, revision: int) -> None:
        since = f": what it has begins at {revision}" if revision else ""
        super().__init__(f"etcd has compacted that revision away{since}")
        self.revision = revision


class ClientClosed(EtcdError):
    """The client was closed, by ourselves."""

    def __init__(self) -> None:
        super().__init__("the client of etcd is closed")


class TokenRefused(EtcdError):
    """A token is not accepted, or is missing. Nothing was done. With another one, the same call may do.

    They die of age and with the memory of a member.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def final(self) -> EtcdRefused:
        """The error if there is no other token."""
        return EtcdRefused(self.reason, str(self))


# What etcd says, by the part of the text that all versions from 3.4 to 3.6 share.
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

# The last: there was none, since there was no need for one before.
_TOKEN_GONE = ("invalid auth token", "auth store is old", "user name is empty")

# Another member may do better, or the same one soon.
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
    """The error for a call's status.

    Args:
        code: Of the status; anything that doesn't tell of a refusal is a connection that broke, or a server in
            trouble.
        text: Of the status.
        where: The endpoint, for people.
    """
    said = text.lower()
    message = f"{where}: {text or code.name}"
    if any(words in said for words in _TOKEN_GONE):
        return TokenRefused(Reason.UNAUTHENTICATED, message)
    if any(words in said for words in _TRY_AGAIN):
        return EtcdUnavailable(message)
    if "has been compacted" in said:
        return Compacted(0)
    for words, reason in _REFUSALS:
        if words in said:
            return EtcdRefused(reason, message)
    if code in _REFUSED_CODES:
        return EtcdRefused(_REFUSED_CODES[code], message)
    return EtcdUnavailable(message)


# What gRPC says of a request that it could not send on a stream. The server's own words for ending the stream, if that
# is why, were still on their way, and are not to be had any more.
_NOT_SENT = "internal error from core"


def of_call(error: grpc.aio.AioRpcError, where: str) -> EtcdError:
    """The error for a call that failed."""
    text = error.details() or ""
    if error.code() is grpc.StatusCode.INTERNAL and text.lower() == _NOT_SENT:
        return EtcdUnavailable(
            f"{where}: the stream ended before the request was sent: the member has no leader, or is gone"
        )
    return error_for(error.code(), text, where)
