"""Ranks of a round are exactly 0 … n-1, survivors keep theirs, and names are ordered as people count."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.rendezvous.core.ranks import assign_seats
from rallypoint.rendezvous.core.state import Node


def node(node_id: str, workers: int = 1, role: str = "trainer") -> Node:
    return Node(node_id, 1, f"{node_id}.cluster", workers, role, 0.0, 0.0)


def order(nodes: list[str], former: list[str]) -> list[str]:
    """The node_ids by their new group ranks."""
    former_ranks = {node_id: rank for rank, node_id in enumerate(former) if node_id != "-"}
    return [seat.node_id for seat in assign_seats([node(node_id) for node_id in nodes], former_ranks)]


@pytest.mark.parametrize(
    ("nodes", "former", "expected"),
    [
        pytest.param("c a b", "", "a b c", id="newcomers in the order of their names, not of their coming"),
        pytest.param("n10 n9 n2 n1", "", "n1 n2 n9 n10", id="numbers in names count as numbers"),
        pytest.param("r2n1 r10n1 r2n10", "", "r2n1 r2n10 r10n1", id="all the numbers in a name"),
        pytest.param("c b a", "a b c", "a b c", id="nobody changes: everybody keeps the rank"),
        pytest.param("b c d", "a b c", "d b c", id="a newcomer takes the free rank"),
        pytest.param("b c", "a b c", "c b", id="a rank that fell off the end moves into the gap"),
        pytest.param("c d e", "a b c d e", "d e c", id="several that fell off keep their order"),
        pytest.param("a0 a b c", "a b c", "a b c a0", id="whoever joins a growing round comes after"),
        pytest.param(
            "c z d", "a b c z d", "z d c", id="their order is that of their ranks, not of their names"
        ),
        pytest.param("d b z", "a x y d z", "d z b", id="survivors go before newcomers"),
        pytest.param("a c", "a - c", "a c", id="a rank that was vacated before is free as well"),
    ],
)
def test_the_policy_stable(nodes: str, former: str, expected: str) -> None:
    """Survivors keep their group rank where the round is large enough for it; the rest fill the gaps."""
    assert order(nodes.split(), former.split()) == expected.split()


def test_workers_are_counted_along_the_group_ranks() -> None:
    """Nodes of different sizes: base ranks are the sums of the sizes before."""
    seats = assign_seats([node("a", 2), node("b", 4), node("c", 1)], {})
    assert [(seat.base_rank, seat.local_world_size) for seat in seats] == [(0, 2), (2, 4), (6, 1)]


def test_role_ranks_count_the_workers_of_one_role() -> None:
    """Each role has ranks of its own, in the order of the group ranks, and every seat knows its role's size."""
    seats = assign_seats([node("a", 2, "trainer"), node("b", 3, "reader"), node("c", 2, "trainer")], {})
    assert [seat.base_role_rank for seat in seats] == [0, 0, 2]
    assert [seat.role_world_size for seat in seats] == [4, 3, 4]


NAMES = [f"n{number}" for number in range(12)]


@settings(deadline=None)
@given(
    members=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.sampled_from("tre")),
        unique_by=lambda member: member[0],
        min_size=1,
    ),
    former=st.lists(st.sampled_from(NAMES), unique=True),
)
def test_whoever_takes_part_the_ranks_are_exact(
    members: list[tuple[str, int, str]], former: list[str]
) -> None:
    """Group, worker and role ranks are partitions without gap or overlap, and whoever can keep a rank keeps it."""
    former_ranks = {node_id: rank for rank, node_id in enumerate(former)}
    seats = assign_seats([node(*member) for member in members], former_ranks)
    roles = {node_id: role for node_id, _, role in members}

    assert [seat.group_rank for seat in seats] == list(range(len(members)))
    assert {seat.node_id for seat in seats} == set(roles)
    of_role: dict[str, int] = defaultdict(int)
    next_rank = 0
    for seat in seats:
        role = roles[seat.node_id]
        assert (seat.base_rank, seat.base_role_rank) == (next_rank, of_role[role])
        next_rank += seat.local_world_size
        of_role[role] += seat.local_world_size
    assert all(seat.role_world_size == of_role[roles[seat.node_id]] for seat in seats)
    for seat in seats:
        rank = former_ranks.get(seat.node_id, len(seats))
        assert rank >= len(seats) or seat.group_rank == rank
