"""The next replica to call: the owner, the last that answered, the list in turn; never in circles, with rests."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from rallypoint.rpc.address import Address
from rallypoint.rpc.endpoint import parse_endpoint
from rallypoint.rpc.selector import REPLY_TIMEOUT, ReplicaSearch, ReplicaSelector

A, B, C, FAR = (Address.of(parse_endpoint(f"{name}:1")) for name in ("a", "b", "c", "far"))
NOW = 100.0


def begin(*places: Address, draw: float = 0.0) -> ReplicaSearch:
    return ReplicaSearch(ReplicaSelector(places or (A, B, C), lambda: draw))


def test_clients_begin_at_different_addresses() -> None:
    """Over a thousand clients, each address is the first equally often."""
    first = Counter(begin(draw=number / 1000).next(NOW) for number in range(1000))
    assert sorted(first.values()) == [333, 333, 334]


def test_every_replica_is_called_before_a_rest() -> None:
    """They are called in turn, at once; after the rest the search begins with another, so that none gets most calls."""
    search = begin()
    asked: list[Address] = []
    while not asked or search.at_once:
        asked.append(search.next(NOW))
        search.refused(asked[-1], NOW)
    assert asked == [A, B, C]
    search.rest()
    assert not search.at_once
    assert search.next(NOW + 60.0) == B


def test_a_replica_that_answered_is_called_again() -> None:
    """Other calls use it as well."""
    search = begin()
    search.refused(search.next(NOW), NOW)
    search.answered(B)
    assert search.next(NOW) == B
    assert ReplicaSearch(search.selector).next(NOW) == B


def test_the_owner_is_called_at_once() -> None:
    """Other calls use it too, and this one after rests; also if it is outside the list."""
    search = begin()
    search.pointed(A, FAR, NOW)
    assert search.at_once
    assert search.next(NOW) == FAR
    search.answered(FAR)
    search.rest()
    assert search.next(NOW) == ReplicaSearch(search.selector).next(NOW) == FAR


def test_an_owner_that_just_failed_is_not_called_on_a_redirect() -> None:
    """The others name it until its lease has expired; it is tried again a moment later."""
    search = begin()
    search.refused(A, NOW)
    search.pointed(B, A, NOW)
    assert not search.at_once
    search.rest()
    assert search.next(NOW) != A
    search.pointed(C, A, NOW)
    assert not search.at_once
    search.rest()
    assert search.next(NOW + 1.0) == A


def test_a_silent_owner_is_avoided_for_longer_each_time() -> None:
    """A call to it costs a timeout; but it is not avoided for ever, since it may come back as the owner."""
    search = begin()
    avoided = []
    for _ in range(5):
        search.refused(A, NOW, silent=True)
        avoided.append(next(span for span in range(100) if not search.selector.is_doubtful(A, NOW + span)))
    assert avoided == [2, 4, 8, 16, 16]
    search.answered(A)
    assert not search.selector.is_doubtful(A, NOW)


def test_after_a_rest_a_silent_replica_is_called_last() -> None:
    """Its doubt may be over: the replica that took over is found before its node is lost (seed 120663693)."""
    search = begin()
    search.pointed(A, B, NOW)  # B took over, and is suspended; A takes over again
    for silent in (B, C):
        assert search.next(NOW) == silent
        search.refused(silent, NOW, silent=True)
    assert not search.at_once
    search.rest()
    assert search.next(NOW + 60.0) == A
    search.pointed(A, C, NOW + 60.0)
    assert search.next(NOW + 60.0) == C, "named by one that replies"


def test_the_timeout_stays_bounded_in_a_long_outage() -> None:
    """Timeouts double no further than to the longest one, however often a replica is silent."""
    search = begin()
    for _ in range(2_000):
        search.refused(A, NOW, silent=True)
    assert search.selector.timeout(A, REPLY_TIMEOUT) == 16.0


def test_replicas_that_point_at_one_another_are_not_followed_in_circles() -> None:
    search = begin()
    search.pointed(A, B, NOW)
    assert search.at_once
    search.pointed(B, A, NOW)
    assert not search.at_once


def test_a_chain_of_owners_without_end_is_not_followed_without_end() -> None:
    search, place, hops = begin(), A, 0
    while hops < 100:
        search.pointed(place, following := Address.of(parse_endpoint(f"x{hops}:1")), NOW)
        if not search.at_once:
            break
        place, hops = following, hops + 1
    assert 1 < hops < 10


def test_a_replica_that_names_itself_is_not_called_at_once_again() -> None:
    search = begin()
    search.pointed(A, A, NOW)
    assert not search.at_once
    assert search.next(NOW) == B


def test_no_owner_means_a_rest() -> None:
    """The others know of none either."""
    search = begin()
    search.pointed(A, None, NOW)
    assert not search.at_once


def test_an_owner_that_is_gone_is_forgotten() -> None:
    """It may be outside the list, and would otherwise be tried for ever."""
    search = begin()
    search.pointed(A, FAR, NOW)
    search.refused(FAR, NOW)
    assert FAR not in search.selector.ordered
    assert search.at_once
    assert search.next(NOW) == B


def test_a_temporary_refusal_is_no_reason_to_change_replica() -> None:
    """A service that is full is full on every replica."""
    search = begin()
    search.declined(A)
    assert not search.at_once
    assert search.next(NOW) == A


def test_calls_time_out_only_if_there_is_another_replica() -> None:
    """It doubles with each silence of an address, so that a slow one gets to answer, and starts again with that."""
    assert begin(A).selector.timeout(A, REPLY_TIMEOUT) == math.inf
    search = begin()
    patience = []
    for _ in range(5):
        patience.append(search.selector.timeout(A, REPLY_TIMEOUT))
        search.refused(A, NOW, silent=True)
    assert patience == [4.0, 8.0, 16.0, 16.0, 16.0]
    assert search.selector.timeout(B, REPLY_TIMEOUT) == REPLY_TIMEOUT
    search.answered(A)
    assert search.selector.timeout(A, REPLY_TIMEOUT) == REPLY_TIMEOUT


def test_a_single_address_is_called_with_a_rest_before_each_retry() -> None:
    search = begin(A)
    for _ in range(3):
        assert search.next(NOW) == A
        search.refused(A, NOW)
        assert not search.at_once
        search.rest()


def test_a_list_that_changed_is_used_from_then_on() -> None:
    """A replica that answers stays known, also outside the list."""
    search = begin()
    search.answered(A)
    search.selector.renew([B, FAR])
    assert search.next(NOW) == A
    search.refused(A, NOW)
    assert {search.next(NOW), *search.selector.ordered} == {B, FAR}


@pytest.mark.parametrize("named", ["rdzv.example:1", "10.0.0.1:1"])
def test_an_owner_is_known_as_the_list_has_it(named: str) -> None:
    """Its certificate is checked for the name that the user gave."""
    listed = parse_endpoint("rdzv.example:1")
    place = Address(parse_endpoint("10.0.0.1:1"), listed)
    known = ReplicaSelector([place, A], lambda: 0.0).known_as(Address.of(parse_endpoint(named)))
    assert (known, known.listed) == (place, listed)


def test_a_replica_that_answers_a_redirected_call_is_published_as_the_owner() -> None:
    """Any call reports it to all others; merely answering, as any replica may, or being named, proves nothing."""
    route = ReplicaSelector((A, B, C), lambda: 0.0)
    found: list[Address] = []
    forget = route.when_found(found.append)
    search = ReplicaSearch(route)
    search.answered(A)
    search.pointed(B, C, NOW)
    search.refused(C, NOW)
    search.answered(A)
    assert found == []
    search.pointed(B, C, NOW)
    search.answered(C)
    assert found == [C]
    forget()
    search.pointed(B, C, NOW)
    search.answered(C)
    assert found == [C]
