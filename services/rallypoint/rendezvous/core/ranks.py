"""Ranks: the group rank and worker ranks of every node in a round."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.rendezvous.core.state import Node, RankPolicy, Seat


def assign_seats(
    nodes: Sequence[Node], former_ranks: Mapping[str, int], policy: RankPolicy = RankPolicy.STABLE
) -> tuple[Seat, ...]:
    """Give every node its ranks; `former_ranks`: group rank by node_id in the round before.

    Worker ranks follow the group ranks, and role ranks count the workers of one role in the same order, as in
    torchelastic.

    Returns:
        The rank assignments, by group rank 0 … n-1.
    """
    order = _ORDERS[policy](nodes, former_ranks)
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


def _stable(nodes: Sequence[Node], former_ranks: Mapping[str, int]) -> list[Node]:
    """Survivors keep their group rank if the round is large enough for it.

    The free ranks go to survivors whose rank is beyond the round's size, then to newcomers in the order of their names.
    """
    ranked: list[Node | None] = [None] * len(nodes)
    unranked: list[Node] = []
    for node in nodes:
        rank = former_ranks.get(node.node_id, len(nodes))
        if rank < len(nodes):
            ranked[rank] = node
        else:
            unranked.append(node)
    rest = iter(sorted(unranked, key=_seniority(former_ranks)))
    return [node if node is not None else next(rest) for node in ranked]


def _sorted(nodes: Sequence[Node], former_ranks: Mapping[str, int]) -> list[Node]:
    """By address and name: torch's order, except that numbers in them are compared as numbers."""
    return sorted(nodes, key=lambda node: (_natural(node.address), _natural(node.node_id)))


def _by_topology(nodes: Sequence[Node], former_ranks: Mapping[str, int]) -> list[Node]:
    """Nodes at one location stay adjacent, on every level of the topology.

    Locations form a tree, and a walk through it visits each location's nodes together, in any order of its branches.
    Branches are ordered by seniority: the location of the most senior node comes first, so that rank 0 stays where it
    is as long as its node lives.
    """
    seniority = _seniority(former_ranks)

    def walk(members: Iterable[Node], depth: int) -> list[Node]:
        locations: dict[str | None, list[Node]] = defaultdict(list)
        for node in members:
            path = node.topology.split("/") if node.topology else []
            locations[path[depth] if depth < len(path) else None].append(node)
        branches = [
            sorted(branch, key=seniority) if name is None else walk(branch, depth + 1)
            for name, branch in locations.items()
        ]
        branches.sort(key=lambda branch: min(map(seniority, branch)))
        return [node for branch in branches for node in branch]

    return walk(nodes, 0)


_ORDERS: Mapping[RankPolicy, Callable[[Sequence[Node], Mapping[str, int]], list[Node]]] = {
    RankPolicy.STABLE: _stable,
    RankPolicy.SORTED: _sorted,
    RankPolicy.TOPOLOGY: _by_topology,
}

_Natural = tuple[tuple[int, int, str], ...]


def _seniority(former_ranks: Mapping[str, int]) -> Callable[[Node], tuple[int, _Natural]]:
    """Return a sort key: survivors by their rank in the round before, then newcomers by name."""
    newcomer = max(former_ranks.values(), default=0) + 1
    return lambda node: (former_ranks.get(node.node_id, newcomer), _natural(node.node_id))


def _natural(name: str) -> _Natural:
    """Return a sort key under which numbers inside names are compared as numbers."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)
