"""Reading a range in pages of bearable size, all at one revision."""

from __future__ import annotations

from rallypoint.etcd.codec import from_pairs
from rallypoint.etcd.errors import Compacted, EtcdRefused, Reason
from rallypoint.etcd.members import Members
from rallypoint.etcd.v1 import kv_pb2
from rallypoint.etcd.values import KeyValue, Snapshot

# Keys in the first page: with the largest values that etcd takes by default, 96 MiB. Later pages go by what came.
_FIRST_PAGE = 64
_LARGEST_PAGE = 4096
# What a page should have, so that one comes well within the time for an attempt and nobody waits for its decoding.
_PAGE_BYTES = 4 * 1024 * 1024
# Reads whose revision is compacted between two pages begin anew, at a newer one.
_MOST_READS = 5


def next_page_size(size: int, keys: int, page_bytes: int) -> int:
    """How many keys to ask for next.

    Args:
        size: Keys that were asked for.
        keys: Keys that came, at least 1.
        page_bytes: Their size.
    """
    fitting = _PAGE_BYTES * keys // max(1, page_bytes)
    # No more than four times as many at once: the next values may be larger.
    return max(1, min(fitting, 4 * size, _LARGEST_PAGE))


async def read_pages(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    """Read all of a range.

    Raises:
        Compacted: The revision that the request names is gone.
        EtcdUnavailable: No member answered in time.
        EtcdRefused: It is refused.
    """
    reads = 0
    while True:
        try:
            return await _read(members, request)
        except Compacted:
            reads += 1
            if request.revision or reads == _MOST_READS:
                raise


async def _read(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    page = kv_pb2.RangeRequest()
    page.CopyFrom(request)
    page.limit = _FIRST_PAGE
    pairs: list[KeyValue] = []
    while True:
        try:
            # What a member has, it can tell without a leader.
            response = await members.ask(
                "/etcdserverpb.KV/Range", page, kv_pb2.RangeResponse, leader=not page.serializable
            )
        except EtcdRefused as error:
            if error.reason is not Reason.TOO_LARGE or page.limit == 1:
                raise
            page.limit = max(1, page.limit // 8)
            continue
        # The first page says which revision all the others are read at.
        page.revision = page.revision or response.header.revision
        pairs += from_pairs(response.kvs)
        if not response.more or not response.kvs:
            return Snapshot(pairs, page.revision)
        page.key = response.kvs[-1].key + b"\0"
        page.limit = next_page_size(page.limit, len(response.kvs), response.ByteSize())
