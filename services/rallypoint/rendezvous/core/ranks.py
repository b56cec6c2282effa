"""Ranks: which place every node gets in a round."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rallypoint.rendezvous.core.state import Node, Seat


def assign_seats(nodes: Sequence[Node], former_ranks: Mapping[str, int]) -> tuple[Seat, ...]:
    """Give every node its ranks, by the policy `stable`.

    Survivors keep their group rank where the round is large enough for it; the free ranks go to survivors
    whose rank fell off the end, then to newcomers in the natural order of their names (node2 before node10).
    Worker ranks follow the group ranks, and role ranks count the workers of one role in the same order, as
    in torchelastic.

    Args:
        nodes: The participants.
        former_ranks: Group rank by node_id in the round before.

    Returns:
        The seats, by group rank 0 … n-1.
    """
    ranked: list[Node | None] = [None] * len(nodes)
    homeless: list[Node] = []
    for node in nodes:
        rank = former_ranks.get(node.node_id, len(nodes))
        if rank < len(nodes):
            ranked[rank] = node
        else:
            homeless.append(node)
    newcomer = len(former_ranks) + len(nodes)
    homeless.sort(key=lambda node: (former_ranks.get(node.node_id, newcomer), _natural(node.node_id)))
    unplaced = iter(homeless)
    order = [node if node is not None else next(unplaced) for node in ranked]

    role_sizes: dict[str, int] = defaultdict(int)
    for node in order:
        role_sizes[node.role] += node.local_world_size
    base_rank = 0
    base_role_rank: dict[str, int] = defaultdict(int)
    seats = []
    for group_rank, node in enumerate(order):
        seats.append(
            Seat(
                node_id=node.node_id,
                group_rank=group_rank,
                base_rank=base_rank,
                base_role_rank=base_role_rank[node.role],
                role_world_size=role_sizes[node.role],
                local_world_size=node.local_world_size,
            )
        )
        base_rank += node.local_world_size
        base_role_rank[node.role] += node.local_world_size
    return tuple(seats)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which numbers inside names count as numbers."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)
