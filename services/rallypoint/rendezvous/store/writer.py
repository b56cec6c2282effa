"""On whose behalf something is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Writer:
    """The node that a write is done for.

    Attributes:
        node_id: Name of the node.
        lease: Its right to act.
    """

    node_id: str
    lease: int
