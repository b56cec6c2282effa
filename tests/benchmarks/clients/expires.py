"""A worker of an agent, in `expires`: measures guarded blocks, and blocks without a timer."""

from __future__ import annotations

import json
import sys
from types import TracebackType

from benchmarks.clients.block_costs import BlocksOrder, costs_of, write_costs
from rallypoint.timer import expires

_AFTER = 60
_SCOPE = "step"


class Nothing:
    """A context manager that does nothing: the least cost of one."""

    __slots__ = ()

    def __init__(self, after: float, scope: str | None = None) -> None:
        return

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


def _default() -> None:
    with expires(after=_AFTER):
        pass


def _explicit() -> None:
    with expires(after=_AFTER, scope=_SCOPE):
        pass


def _nothing() -> None:
    with Nothing(after=_AFTER):
        pass


def _nothing_named() -> None:
    with Nothing(after=_AFTER, scope=_SCOPE):
        pass


def main() -> None:
    """Carry out the order in the only argument."""
    order = BlocksOrder(**json.loads(sys.argv[1]))
    blocks = {
        "default": _default,
        "floor.default": _nothing,
        "explicit": _explicit,
        "floor.explicit": _nothing_named,
    }
    write_costs(order.answer, costs_of(blocks, order))


if __name__ == "__main__":
    main()
