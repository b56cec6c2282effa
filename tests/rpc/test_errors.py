"""An error arrives at the client with all its fields, and always arrives."""

from __future__ import annotations

import json

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.rpc.errors import DOMAIN, ServiceError, decode, encode, invalid, json_list


def over_the_wire(error: ServiceError) -> grpc.aio.AioRpcError:
    status = encode(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


def test_an_error_survives_the_wire_whole() -> None:
    sent = ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "LEASE_SUPERSEDED",
        "node n1 joined again; this lease is over",
        metadata={"node_id": "n1", "revision": "17"},
        field_violations=[("lease", "superseded"), ("node.id", "ünïcode")],
        retry_after=0.25,
    )
    got = decode(over_the_wire(sent))
    assert vars(got) == vars(sent)
    assert str(got) == "node n1 joined again; this lease is over"


def test_the_reason_and_the_delay_are_trailers_for_people() -> None:
    """They are text, beside the details, which tools print as base64."""
    trailers = dict(encode(invalid("a", "b")).trailing_metadata)
    assert trailers.keys() == {"grpc-status-details-bin", "rallypoint-reason"}
    assert trailers["rallypoint-reason"] == "INVALID_ARGUMENT"
    busy = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_\tBÜSY\n", "later", retry_after=2)
    trailers = dict(encode(busy).trailing_metadata)
    assert (trailers["rallypoint-reason"], trailers["rallypoint-retry-after"]) == ("STORE_?B?SY?", "2.000")


def test_the_wire_names_the_domain() -> None:
    status = rpc_status.from_call(over_the_wire(invalid("min_nodes", "is 0, expected at least 1")))
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert (info.domain, info.reason) == (DOMAIN, "INVALID_ARGUMENT")


def test_invalid_names_the_field_for_people_and_for_programs() -> None:
    error = invalid("settings.min_nodes", "is 0, expected at least 1")
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "settings.min_nodes: is 0, expected at least 1"
    assert error.field_violations == (("settings.min_nodes", "is 0, expected at least 1"),)


def test_a_status_without_details_takes_its_code_for_a_reason() -> None:
    bare = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "Deadline Exceeded"
    )
    got = decode(bare)
    assert (got.code, got.reason, got.message) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        "Deadline Exceeded",
    )


@pytest.mark.parametrize("details", [b"\xff\xff garbage", encode(invalid("a", "b")).trailing_metadata[0][1]])
def test_details_that_are_garbage_or_contradict_the_status_are_ignored(details: bytes) -> None:
    strange = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", details)),
        "no such run",
    )
    got = decode(strange)
    assert (got.code, got.reason, got.message) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "no such run")


@given(
    st.text(),
    st.text(),
    st.dictionaries(st.text(), st.text(), max_size=20),
    st.lists(st.tuples(st.text(), st.text())),
    st.integers(1, 5000),
)
@settings(max_examples=60)
def test_no_error_outgrows_the_metadata_that_a_client_takes(
    reason: str, message: str, metadata: dict[str, str], violations: list[tuple[str, str]], times: int
) -> None:
    error = ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        reason * times,
        message * times,
        metadata={key * times: value * times for key, value in metadata.items()},
        field_violations=[(field * times, text * times) for field, text in violations] * 10,
        retry_after=1e6,
    )
    status = encode(error)
    details = status.trailing_metadata[0][1]
    assert len(status.details.encode()) * 3 + len(details) * 4 / 3 < 7600
    assert decode(over_the_wire(error)).code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("values", "whole"),
    [([f"{'€' * 20}{n}" for n in range(8)], True), (range(96), True), (range(1000), False)],
)
def test_a_list_arrives_as_one(values: list[str | int], whole: bool) -> None:
    """All of it arrives, or its first values."""
    error = ServiceError(grpc.StatusCode.NOT_FOUND, "NO_WORKER", "none", metadata={"list": json_list(values)})
    got = json.loads(decode(over_the_wire(error)).metadata["list"])
    assert got == list(values)[: len(got)]
    assert (len(got) == len(values)) == whole
    assert len(got) >= 8


def test_characters_that_utf8_cannot_encode_are_replaced() -> None:
    assert encode(invalid("path", "\udcff is no file")).details == "path: ? is no file"
