"""Ranks of a round are exactly 0 … n-1, survivors keep theirs, and numbers in names are ordered by value."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.core.ranks import assign_seats
from rallypoint.rendezvous.core.state import Node, RankPolicy, Seat


def node(
    node_id: str, workers: int = 1, role: str = "trainer", topology: str = "", address: str = ""
) -> Node:
    return Node(node_id, 1, address or f"{node_id}.cluster", workers, role, topology, 0.0, 0.0)


def order(nodes: list[str], former: list[str]) -> list[str]:
    """Return the node_ids by their new group ranks."""
    return ids(assign_seats([node(node_id) for node_id in nodes], ranks(former)))


def ranks(former: list[str]) -> dict[str, int]:
    """Return the group ranks of the previous round; "-" is a rank without a node."""
    return {node_id: rank for rank, node_id in enumerate(former) if node_id != "-"}


def ids(seats: tuple[Seat, ...]) -> list[str]:
    return [seat.node_id for seat in seats]


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


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param("node10 node9 node2", "node2 node9 node10", id="numbers in names count as numbers"),
        pytest.param("b a", "a b", id="names without numbers in the order of the alphabet"),
        pytest.param("n02 n1 n10 n2", "n1 n02 n2 n10", id="leading zeros don't count, and don't confuse"),
        pytest.param("r10-n1 r2-n11 r2-n3", "r2-n3 r2-n11 r10-n1", id="every number in a name counts"),
        pytest.param("a1b a1", "a1 a1b", id="what is longer comes after"),
        pytest.param("a 1", "1 a", id="numbers come before letters"),
        pytest.param("n٣ n10 n2", "n2 n٣ n10", id="whatever digits they are written in"),
    ],
)
def test_the_policy_sorted(nodes: str, expected: str) -> None:
    """By address; former ranks do not matter."""
    members = [node(node_id, address=node_id) for node_id in nodes.split()]
    for former in (nodes.split(), nodes.split()[::-1], []):
        assert ids(assign_seats(members, ranks(former), RankPolicy.SORTED)) == expected.split()


def test_sorted_goes_by_address_and_then_by_name() -> None:
    """As torch's order does; several nodes may share a host."""
    members = [
        node("a", address="host2"),
        node("n10", address="host1"),
        node("z", address="host1"),
        node("n9", address="host1"),
    ]
    assert ids(assign_seats(members, {}, RankPolicy.SORTED)) == ["n9", "n10", "z", "a"]


@pytest.mark.parametrize(
    ("places", "former", "expected"),
    [
        pytest.param("a:r1 b:r2 c:r1", "", "a c b", id="a rack's nodes stay together"),
        pytest.param("c:r1 b:r2 a:r2 d:r1", "c b", "c d b a", id="the rack of rank 0 comes first"),
        pytest.param("c:r1 b:r2 a:r2 d:r1", "b c", "b a c d", id="whichever rack that is"),
        pytest.param("a:r1 b:r1 c:r1", "c a b", "c a b", id="within a rack survivors keep their order"),
        pytest.param("a:r1 b:r2", "- a b", "a b", id="a rank 0 that is gone leaves the order of the rest"),
        pytest.param("a:h1/r1 b:h2/r1 c:h1/r2 d:h1/r1", "", "a d c b", id="hall before rack"),
        pytest.param("a:h1/r1 b:h2/r1", "", "a b", id="racks of one name in two halls are two racks"),
        pytest.param(
            "a:h1 b:h1/r1 c:h1 d:h2 e:h1/r1", "", "a c b e d", id="who is somewhere in the hall stays in it"
        ),
        pytest.param("a b:r1 c d:r1", "", "a c b d", id="who is nowhere is in one place with its like"),
        pytest.param("a:r1/ b:r1 c:r1/", "", "a c b", id="a place without a name is a place"),
        pytest.param("n10:r1 n9:r2 n2:r1", "", "n2 n10 n9", id="newcomers in the order that people count in"),
        pytest.param("z:r2 a:r1 b:r2", "z", "z b a", id="newcomers after the survivors of any rack"),
    ],
)
def test_the_policy_topology(places: str, former: str, expected: str) -> None:
    """Nodes of one place are adjacent; within a place, and among places, the most senior comes first."""
    pairs = [place.partition(":") for place in places.split()]
    members = [node(node_id, topology=topology) for node_id, _, topology in pairs]
    got = ids(assign_seats(members, ranks(former.split()), RankPolicy.TOPOLOGY))
    assert got == expected.split()


@pytest.mark.parametrize("policy", RankPolicy)
def test_the_order_of_joining_does_not_affect_ranks(policy: RankPolicy) -> None:
    """The same nodes get the same ranks in any order of joining, which is chance."""
    members = [node(f"n{number}", topology=f"r{number % 3}") for number in range(7)]
    expected = ids(assign_seats(members, {"n5": 0, "n1": 3}, policy))
    for rotation in range(7):
        assert (
            ids(assign_seats(members[rotation:] + members[:rotation], {"n5": 0, "n1": 3}, policy)) == expected
        )


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
PLACES = ["", "h1", "h2", "h1/r1", "h1/r2", "h2/r1", "h2/r1/s1", "h2/r1/s2", "h1/r1/s1"]
members_of_a_round = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.sampled_from("tre"), st.sampled_from(PLACES)),
    unique_by=lambda member: member[0],
    min_size=1,
)
former_rounds = st.lists(st.sampled_from(NAMES), unique=True)


@given(members=members_of_a_round, former=former_rounds, policy=st.sampled_from(RankPolicy))
def test_the_ranks_are_exact_for_any_members(
    members: list[tuple[str, int, str, str]], former: list[str], policy: RankPolicy
) -> None:
    """Group, worker and role ranks are partitions without gap or overlap, under every policy."""
    seats = assign_seats([node(*member) for member in members], ranks(former), policy)
    roles = {node_id: role for node_id, _, role, _ in members}

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


@given(members=members_of_a_round, former=former_rounds)
def test_under_stable_a_node_that_can_keep_its_rank_keeps_it(
    members: list[tuple[str, int, str, str]], former: list[str]
) -> None:
    """In a smaller round as in a larger one."""
    former_ranks = ranks(former)
    for seat in assign_seats([node(*member) for member in members], former_ranks):
        rank = former_ranks.get(seat.node_id, len(members))
        assert rank >= len(members) or seat.group_rank == rank


@given(members=members_of_a_round, former=former_rounds)
def test_under_topology_every_place_is_one_stretch_of_ranks(
    members: list[tuple[str, int, str, str]], former: list[str]
) -> None:
    """On every level: the nodes of a hall, of each rack in it, of each switch in that."""
    seats = assign_seats([node(*member) for member in members], ranks(former), RankPolicy.TOPOLOGY)
    places = {node_id: place.split("/") if place else [] for node_id, _, _, place in members}
    for depth in (1, 2, 3):
        on_the_level = ["/".join(places[seat.node_id][:depth]) for seat in seats]
        stretches = [place for place, _ in groupby(on_the_level) if place and place.count("/") == depth - 1]
        assert len(stretches) == len(set(stretches))


@given(members=members_of_a_round, former=former_rounds)
def test_under_topology_the_most_senior_survivor_is_the_first(
    members: list[tuple[str, int, str, str]], former: list[str]
) -> None:
    """So the master address changes only when its node has gone; within a place the survivors keep their order."""
    former_ranks = ranks(former)
    order = ids(assign_seats([node(*member) for member in members], former_ranks, RankPolicy.TOPOLOGY))
    survivors = sorted(
        (node_id for node_id in order if node_id in former_ranks), key=former_ranks.__getitem__
    )
    assert not survivors or order[0] == survivors[0]
    places = {node_id: place for node_id, _, _, place in members}
    for place in set(places.values()):
        there = [node_id for node_id in order if places[node_id] == place]
        assert [node_id for node_id in there if node_id in former_ranks] == [
            node_id for node_id in survivors if places[node_id] == place
        ]
