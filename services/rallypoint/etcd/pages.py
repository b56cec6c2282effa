"""Reading a range in pages of bearable size, all at one revision."""

from __future__ import annotations

from rallypoint.etcd.codec import from_pairs
from rallypoint.etcd.errors import Compacted, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.members import Members
from rallypoint.etcd.v1 import kv_pb2
from rallypoint.etcd.values import KeyValue, Snapshot

# Keys in the first page, of which nothing is known: 4 MiB with the largest values of a journal, 12 MiB with the largest
# that etcd takes by default. Later pages go by what came.
_FIRST_PAGE = 8
_LARGEST_PAGE = 4096
# What a page should have, so that one comes well within the time for an attempt (0.2 s at 25 MB/s) and nobody waits for
# its decoding.
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


class PageSizes:
    """How many keys to ask for, from page to page.

    Attributes:
        keys: Of the next page.
    """

    def __init__(self, first: int = _FIRST_PAGE) -> None:
        """`first`: keys of the first page."""
        self.keys = first
        # Keys ahead that did not come as one page, and how many of them to ask for at most.
        self._doubtful = 0
        self._most = first

    def came(self, keys: int, page_bytes: int) -> None:
        """A page of so many keys came, at least 1."""
        self._doubtful -= keys
        self.keys = next_page_size(self.keys, keys, page_bytes)
        if self._doubtful > 0:
            self.keys = min(self.keys, self._most)

    def lost(self) -> None:
        """The page did not come: behind small values, one of large values has a thousand times what was expected.

        No fraction of it is sure to come, and each that doesn't costs an attempt. So the next is a single key, the
        least there is, and from there pages grow by what comes. Where the large values begin isn't known: until all
        keys of the lost page are read, none has more than an eighth of it, or those before the large values would
        make pages grow until the next is lost in the same way, again and again.
        """
        self._doubtful, self._most = self.keys, max(1, self.keys // 8)
        self.keys = 1


async def read_pages(members: Members, request: kv_pb2.RangeRequest) -> Snapshot:
    """Read all of a range.

    There is no bound for all of it, as there is none for what it holds; there is one for the time without any page.

    Raises:
        Compacted: The revision that the request names is gone.
        EtcdUnavailable: No member answered in time, not even with a single key.
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
    sizes = PageSizes() if request.range_end else PageSizes(1)
    pairs: list[KeyValue] = []
    # Seconds for a page of a single key; one of several gets those of an attempt.
    alone = members.request_timeout
    while True:
        page.limit = sizes.keys
        try:
            # What a member has, it can tell without a leader.
            response = await members.ask(
                "/etcdserverpb.KV/Range",
                page,
                kv_pb2.RangeResponse,
                timeout=alone if page.limit == 1 else members.attempt_timeout,
                leader=not page.serializable,
            )
        except (EtcdRefused, EtcdUnavailable) as error:
            if page.limit == 1 or not _may_be_for_its_size(error):
                raise
            sizes.lost()
            # What is left: so, whoever waits for a cluster that is gone hears of it when any other request would say
            # so, unless an attempt may take more than half of a request's time.
            alone = max(members.attempt_timeout, members.request_timeout - members.attempt_timeout)
            continue
        # The first page says which revision all the others are read at.
        page.revision = page.revision or response.header.revision
        pairs += from_pairs(response.kvs)
        if not response.more or not response.kvs:
            return Snapshot(pairs, page.revision)
        page.key = response.kvs[-1].key + b"\0"
        sizes.came(len(response.kvs), response.ByteSize())
        alone = members.request_timeout


def _may_be_for_its_size(error: EtcdRefused | EtcdUnavailable) -> bool:
    """Whether a smaller page may come where this one didn't: a slow link and a member that hangs look the same."""
    return isinstance(error, EtcdUnavailable) or error.reason is Reason.TOO_LARGE
