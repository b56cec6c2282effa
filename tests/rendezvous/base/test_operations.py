"""A record is decoded as it was written, and its key is outside the keys of clients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.base.entries import RESERVED, Operation, OperationRecord


@given(
    st.builds(
        OperationRecord,
        sequence=st.integers(1, 2**63 - 1),
        stamp=st.integers(1),
        fingerprint=st.integers(0, 2**32 - 1),
        result=st.integers(-(2**63), 2**63 - 1),
    )
)
def test_a_record_survives_the_journal(record: OperationRecord) -> None:
    assert OperationRecord.decode(record.encode()) == record


def test_slots_have_keys_of_their_own_that_no_client_can_use() -> None:
    names = {Operation(client, slot, 1).record_key for client in ("a", "a1") for slot in (1, 11)}
    assert len(names) == 4
    assert all(name.startswith(RESERVED) for name in names)
    assert Operation("a", 1, 1).record_key == Operation("a", 1, 2).record_key
