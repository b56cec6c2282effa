"""Errors of a service: one type on both sides of the wire, with its machine-readable details."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyDetail
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, Plaintext, RunSecret
from rallypoint.rpc.text import clip

DOMAIN = "rallypoint"
"""`google.rpc.ErrorInfo.domain` of every error of a Rallypoint service."""

# A client drops a reply whose trailing metadata exceeds 8 KiB (gRPC's default), and loses the error. The message
# is sent twice, once percent-encoded (up to three bytes for one) and once with the details in base64
# (four for three): 3 x 1000 + 4/3 x 3000 bytes are clearly below that.
_MESSAGE_BYTES = 1000
_DETAILS_BYTES = 3000
_VALUE_BYTES = 256
_METADATA_BYTES = 1000


# Codes that mean that a connection or a server is lost, and may soon be back.
GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        # Not from this client: that would be asyncio's CancelledError. A server overloaded by connects sends it.
        grpc.StatusCode.CANCELLED,
        # No service of Rallypoint sends these two: gRPC reports some broken connections with them.
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


MOVED = frozenset({"NOT_OWNER", "OWNERSHIP_LOST"})
"""Reasons of a replica that does not own the run; it names the owner if it knows it. With the second the request may
have been carried out: the owner changed in the meantime."""


UNHEARD = frozenset({grpc.StatusCode.UNAVAILABLE.name, "NO_CONNECTION", "NO_ANSWER"})
"""Reasons of errors that no replica sent: there was no reply. The error of a replica that replied is more useful."""


class ServiceError(Exception):
    """The error that a service returns instead of a result, and that its client raises.

    Raise it in a handler: the server sends it. Texts that are too long are cut, and surplus details left out.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] = MappingProxyType({}),
        field_violations: Sequence[tuple[str, str]] = (),
        retry_after: float | None = None,
    ) -> None:
        """Create the error.

        Args:
            code: action for a generic client. OK, UNKNOWN and INTERNAL are bugs when a handler raises them.
            reason: UPPER_SNAKE, at most 63 characters; stable, for programs (`google.rpc.ErrorInfo.reason`).
            message: one sentence for people: the mistake, its location, the expected value.
            metadata: facts for programs (`ErrorInfo.metadata`).
            field_violations: (field path, mistake) pairs (`google.rpc.BadRequest`).
            retry_after: seconds, at least 0, until the next attempt (`google.rpc.RetryInfo`).
        """
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata)
        self.field_violations = tuple(field_violations)
        self.retry_after = retry_after

    def __repr__(self) -> str:
        return f"ServiceError({self.code.name}, {self.reason}, {self.message!r})"


def invalid(field: str, description: str) -> ServiceError:
    """Return the error for a request that is wrong in every state of the service.

    Args:
        field: path of the offending field in the request message, as in `settings.min_nodes`.
        description: the mistake and the expected value.
    """
    return invalid_fields([(field, description)])


def invalid_fields(violations: Sequence[tuple[str, str]]) -> ServiceError:
    """As `invalid`, for several fields: their (path, mistake) pairs."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "; ".join(f"{field}: {description}" for field, description in violations),
        field_violations=violations,
    )


# Trailers for people who call with grpcurl or buf: their tools print the details as base64.
REASON_TRAILER = "rallypoint-reason"
RETRY_AFTER_TRAILER = "rallypoint-retry-after"


def json_list(values: Iterable[str | int]) -> str:
    """Return a list as metadata has it, for programs in any language: the first of the values, as many as fit."""
    shown, size = [], len("[]")
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        size += len(text.encode()) + len(",")
        if size > _METADATA_BYTES:
            break
        shown.append(text)
    return f"[{','.join(shown)}]"


def encode(error: ServiceError) -> grpc.Status:
    """Return the error as gRPC sends it: code, message, and in the trailing metadata a `google.rpc.Status`, with its
    reason and RetryInfo once more as text."""
    status = status_pb2.Status(code=error.code.value[0], message=clip(error.message, _MESSAGE_BYTES, "…"))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        set_seconds(retry.retry_delay, error.retry_after)
        status.details.add().Pack(retry)
    info = error_details_pb2.ErrorInfo(reason=clip(error.reason, 63, "…"), domain=DOMAIN)
    room = _DETAILS_BYTES - status.ByteSize() - info.ByteSize()
    for key, value in error.metadata.items():
        entry = (clip(key, 64, "…"), clip(value, _METADATA_BYTES, "…"))
        # 8: tags and lengths of a map entry and its two strings.
        room -= len(entry[0].encode()) + len(entry[1].encode()) + 8
        if room < 0:
            break
        info.metadata[entry[0]] = entry[1]
    bad = error_details_pb2.BadRequest()
    for field, description in error.field_violations:
        violation = bad.FieldViolation(
            field=clip(field, _VALUE_BYTES, "…"), description=clip(description, _VALUE_BYTES, "…")
        )
        room -= violation.ByteSize() + 4
        if room < 0:
            break
        bad.field_violations.append(violation)
    status.details.add().Pack(info)
    if bad.field_violations:
        status.details.add().Pack(bad)
    encoded = rpc_status.to_status(status)
    trailers = [*encoded.trailing_metadata, (REASON_TRAILER, re.sub("[^ -~]", "?", info.reason))]
    if error.retry_after is not None:
        trailers.append((RETRY_AFTER_TRAILER, f"{error.retry_after:.3f}"))
    return cast(grpc.Status, encoded._replace(trailing_metadata=tuple(trailers)))


def decode(error: grpc.aio.AioRpcError) -> ServiceError:
    """Return the service's error, on the client's side.

    A reply without details (from gRPC itself: unreachable, cancelled, deadline exceeded; or from another service)
    gives an error whose reason is the name of its code.
    """
    decoded = ServiceError(error.code(), error.code().name, error.details() or error.code().name)
    try:
        # from_call is typed for a grpc.Call, but uses only attributes that AioRpcError has too.
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            _unpack(detail, decoded)
    except (ValueError, DecodeError):
        # Details that contradict the status or are no protobuf: the code and the message are still valid.
        pass
    return decoded


def _unpack(detail: AnyDetail, into: ServiceError) -> None:
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    if detail.Unpack(info):
        into.reason, into.metadata = info.reason, dict(info.metadata)
    elif detail.Unpack(bad):
        into.field_violations = tuple((each.field, each.description) for each in bad.field_violations)
    elif detail.Unpack(retry):
        into.retry_after = to_seconds(retry.retry_delay)


# ---- The change to make when a connection fails in the TLS handshake: gRPC reports only the texts of its libraries.


_OTHER_NAME = "its certificate is for another host name: connect to a name that is in it"
_EXPIRED = "its certificate is expired, or not valid yet: replace it, or check the clocks"
_WANTS_CERTIFICATE = "it may require a client certificate: give --tls-cert and --tls-key"
_WANTS_ANOTHER = "it may require a client certificate of another authority: check --tls-cert"
_WANTS_MORE = "it may require TLS or a run secret: leave --insecure out, and give --tls-ca or the secret"
_OTHER_SECRET = "its run secret is another: give all hosts of the job the same"  # noqa: S105 (a sentence)
_OTHER_USER = (
    "a server listens there that this user did not start, or that needs --tls-ca, --insecure or a run secret"
)


def tls_advice(message: str, security: ClientSecurity) -> str | None:
    """Return the change to make if a failed connection looks like a problem of how it is secured.

    Returns:
        Half a sentence about the server; None if the message is about something else.
    """
    for sign, advice in _advices(security):
        if sign in message:
            return advice
    return None


def _advices(security: ClientSecurity) -> tuple[tuple[str, str], ...]:
    """Return parts of gRPC's texts with the advice for each, the first that is found counts."""
    match security:
        case Plaintext():
            return (("Socket closed", _WANTS_MORE),)
        case ClientTLS():
            return (
                ("WRONG_VERSION_NUMBER", "it speaks plaintext: leave the --tls flags out"),
                ("Hostname Verification", _OTHER_NAME),
                ("certificate has expired", _EXPIRED),
                ("certificate is not yet valid", _EXPIRED),
                ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by an authority in --tls-ca"),
                ("Socket closed", _WANTS_ANOTHER if security.certificate else _WANTS_CERTIFICATE),
            )
        case RunSecret():
            return (
                ("WRONG_VERSION_NUMBER", "it speaks plaintext: start it with the same run secret"),
                ("CERTIFICATE_VERIFY_FAILED", _OTHER_SECRET),
                ("Socket closed", _OTHER_SECRET),
            )
        case None:
            return (
                (
                    "WRONG_VERSION_NUMBER",
                    "it speaks plaintext: give --insecure if you trust who listens there",
                ),
                ("CERTIFICATE_VERIFY_FAILED", _OTHER_USER),
                ("Socket closed", _OTHER_USER),
            )
