"""What is malformed is refused by name of the field, whatever the state."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.store import requests
from rallypoint.rendezvous.store.operations import Operation
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.serving.errors import ServiceError


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "is empty"),
        ("ä" * 513, "has 1,026 bytes"),
        ("\x01operation/c/0", "reserved"),
        ("a\x00b", "NUL"),
        ("\ud800", "no UTF-8"),
    ],
)
def test_keys_that_cannot_be(key: str, why: str) -> None:
    with pytest.raises(ServiceError, match=why) as refused:
        requests.check_key(key)
    assert refused.value.field_violations[0][0] == "key"


@pytest.mark.parametrize("key", ["a", "ä" * 512, "a\x01", "//", " "])
def test_keys_that_can(key: str) -> None:
    requests.check_key(key)


def test_key_lists_are_bounded_and_named_by_place() -> None:
    assert requests.check_keys(["b", "a", "b"]) == ["b", "a"]
    with pytest.raises(ServiceError, match="0 keys"):
        requests.check_keys([])
    with pytest.raises(ServiceError, match="10,001 keys"):
        requests.check_keys(["k"] * 10_001)
    with pytest.raises(ServiceError, match=r"keys\[1\]: is empty"):
        requests.check_keys(["a", ""])


@pytest.mark.parametrize(("run_id", "round", "writer"), [("", 0, 0), ("run", -1, 0), ("run", 0, -1)])
def test_spaces_that_cannot_be(run_id: str, round: int, writer: int) -> None:
    with pytest.raises(ServiceError):
        requests.check_space(run_id, round, writer)


def test_values_have_a_size() -> None:
    requests.check_value("value", [b"x" * requests.MAX_VALUE_BYTES])
    with pytest.raises(ServiceError, match="at most 4,177,920 fit"):
        requests.check_value("value", [b"x" * requests.MAX_VALUE_BYTES, b"x"])


def test_waits_are_bounded() -> None:
    assert requests.wait_seconds(Duration()) == 0
    assert requests.wait_seconds(Duration(seconds=1, nanos=500_000_000)) == 1.5
    for malformed in (
        Duration(seconds=-1),
        Duration(nanos=-1),
        Duration(seconds=86_401),
        Duration(nanos=2_000_000_000),
        Duration(seconds=2, nanos=-1_500_000_000),
    ):
        with pytest.raises(ServiceError, match="timeout"):
            requests.wait_seconds(malformed)


def test_pages_have_a_size() -> None:
    assert requests.page(pb.ListKeysRequest()) == 1_000
    assert requests.page(pb.ListKeysRequest(page_size=7)) == 7
    for size in (-1, 2_001):
        with pytest.raises(ServiceError, match="page_size"):
            requests.page(pb.ListKeysRequest(page_size=size))


def test_operations_are_whole_or_absent() -> None:
    assert requests.operation_of(pb.SetRequest()) is None
    whole = pb.StoreOperation(client_id="c" * 64, slot=65_535, sequence=1)
    assert requests.operation_of(pb.AddRequest(operation=whole)) == Operation("c" * 64, 65_535, 1)
    for field, broken in [
        ("client_id", pb.StoreOperation(sequence=1)),
        ("client_id", pb.StoreOperation(client_id="a/b", sequence=1)),
        ("client_id", pb.StoreOperation(client_id="c" * 65, sequence=1)),
        ("slot", pb.StoreOperation(client_id="c", slot=65_536, sequence=1)),
        ("sequence", pb.StoreOperation(client_id="c")),
    ]:
        with pytest.raises(ServiceError, match=rf"operation\.{field}"):
            requests.operation_of(pb.DeleteRequest(operation=broken))
