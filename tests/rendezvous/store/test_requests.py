"""A malformed request is refused with the name of the field, in any state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.limits import MAX_MULTI_BYTES, MAX_VALUE_BYTES
from rallypoint.rendezvous.store import requests
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rendezvous.v1.state_service_pb2 import SetStateRequest
from rallypoint.rpc.errors import ServiceError


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


def test_names_of_runs_have_a_size() -> None:
    requests.check_space("ä" * 128, 0)
    with pytest.raises(ServiceError, match="run_id: must have at most 256 bytes, not 258"):
        requests.check_space("ä" * 129, 0)


def test_values_have_a_size() -> None:
    requests.check_value("value", [b"x" * MAX_VALUE_BYTES])
    with pytest.raises(ServiceError, match="value: has 4,177,921 bytes; at most 4,177,920 fit"):
        requests.check_value("value", [b"x" * MAX_VALUE_BYTES, b"x"])
    with pytest.raises(ServiceError, match="desired: together with expected has 4,177,921 bytes"):
        requests.check_value("desired", [b"x" * MAX_VALUE_BYTES, b"x"], besides="expected")


def entries_of(sizes: Sequence[int]) -> list[pb.StoreEntry]:
    """Entries of these sizes in bytes, key, value and frame together."""
    return [pb.StoreEntry(key=f"{n:04}", value=b"x" * (size - 20)) for n, size in enumerate(sizes)]


def test_entries_are_checked_one_by_one_and_together() -> None:
    entry = pb.StoreEntry
    twice = [entry(key="a", value=b"1"), entry(key="b"), entry(key="a", value=b"2")]
    assert requests.check_entries(twice) == {"a": b"2", "b": b""}
    full = entries_of([MAX_MULTI_BYTES // 2, MAX_MULTI_BYTES // 2])
    assert requests.check_entries(full) == {"0000": full[0].value, "0001": full[1].value}
    requests.check_entries([entry(key="k" * 1024, value=b"x" * MAX_VALUE_BYTES)])
    requests.check_entries(entries_of([20] * 10_000))
    for malformed, field in [
        (entries_of([]), "entries: has 0 entries"),
        (entries_of([20] * 10_001), "entries: has 10,001 entries"),
        (entries_of([MAX_MULTI_BYTES // 2, MAX_MULTI_BYTES // 2 + 1]), "entries: has 4,186,113 bytes"),
        ([entry(key="a"), entry()], r"entries\[1\]\.key: is empty"),
        (entries_of([MAX_VALUE_BYTES + 21]), r"entries\[0\]\.value: has 4,177,921 bytes"),
    ]:
        with pytest.raises(ServiceError, match=field) as refused:
            requests.check_entries(malformed)
        assert refused.value.field_violations[0][0] == field.partition(":")[0].replace("\\", "")


def test_keys_fit_into_a_message() -> None:
    """A client refuses keys that exceed a request, with a clearer error than gRPC's."""
    requests.check_keys([f"{n:04}" + "k" * 1_000 for n in range(4_000)])
    with pytest.raises(ServiceError, match="keys: has 5,100,000 bytes, 16 for each counted in"):
        requests.check_keys([f"{n:04}" + "k" * 1_000 for n in range(5_000)])


def test_writers_are_whole() -> None:
    """A writer may be absent only where a request needs none; a write to a store needs one."""
    assert requests.named_writer(SetStateRequest()) is None
    with pytest.raises(ServiceError, match="writer: is absent; expected the node"):
        requests.writer_of(pb.SetRequest())
    request = pb.MultiSetRequest(writer=pb.StoreWriter(node_id="n" * 256, lease=2**63 - 1))
    assert requests.writer_of(request) == Writer("n" * 256, 2**63 - 1)
    for field, broken in [
        ("node_id", pb.StoreWriter(lease=1)),
        ("node_id", pb.StoreWriter(node_id="n" * 257, lease=1)),
        ("lease", pb.StoreWriter(node_id="n")),
        ("lease", pb.StoreWriter(node_id="n", lease=-1)),
        ("token", pb.StoreWriter(node_id="n", lease=1, token=bytes(65))),
    ]:
        with pytest.raises(ServiceError, match=rf"writer\.{field}"):
            requests.writer_of(pb.AppendRequest(writer=broken))


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
    for size, keys in ((0, 1_000), (7, 7), (2_001, 2_000)):
        assert requests.page(pb.ListKeysRequest(page_size=size)) == ("", keys)
    with pytest.raises(ServiceError, match="page_size"):
        requests.page(pb.ListKeysRequest(page_size=-1))
    with pytest.raises(ServiceError, match="page_token"):
        requests.page(pb.ListKeysRequest(page_token="k"))  # noqa: S106


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
