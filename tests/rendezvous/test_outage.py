"""The loss of the rendezvous is logged once, with replica and cause; a graceful move is no warning."""

from __future__ import annotations

import logging

import grpc
import pytest

from rallypoint.rendezvous.client import Outage
from rallypoint.rpc.errors import ServiceError
from serving.fleet import not_owner
from support.log_events import log_events

ALL = "a:1,b:1"
LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "socket closed")
NO_ETCD = ServiceError(grpc.StatusCode.UNAVAILABLE, "ETCD_UNAVAILABLE", "no etcd here")
GOING = ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is going away")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "rallypoint.rendezvous.client")
    return caplog


def lines(told: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and event of each line so far."""
    return [(each.level, each.name) for each in log_events(told.records)]


def of_several() -> Outage:
    outage = Outage(ALL)
    outage.over("a:1", replicated=True)
    return outage


def test_a_replica_that_is_lost_is_named_at_once_and_once(told: pytest.LogCaptureFixture) -> None:
    """The line has the first error, not the replies of other replicas; the next loss has a line again."""
    outage = of_several()
    for _ in range(2):
        outage.attempt_failed(LOST, admitted=True, at_once=True)
        for at_once in (True, False, True, False):
            outage.attempt_failed(not_owner("a:1"), admitted=True, at_once=at_once)
        outage.over("b:1", replicated=True)
    lost = ("WARNING", "rendezvous replica lost, looking for the next owner of the run")
    assert lines(told) == [lost, lost]
    assert [each.fields["replica"] for each in log_events(told.records)] == ["a:1", "b:1"]
    assert all("socket closed" in each.fields["error"] for each in log_events(told.records))


@pytest.mark.parametrize("ended", [not_owner("b:1"), GOING], ids=["moved", "drained"])
def test_a_move_in_good_order_is_no_warning(told: pytest.LogCaptureFixture, ended: ServiceError) -> None:
    """It is a warning if no replica has the run afterwards."""
    outage = of_several()
    outage.attempt_failed(ended, admitted=True, at_once=True)
    outage.over("b:1", replicated=True)
    assert lines(told) == [("INFO", "the run moves to another replica")]
    told.clear()
    outage.attempt_failed(ended, admitted=True, at_once=True)
    outage.attempt_failed(NO_ETCD, admitted=True, at_once=True)
    outage.attempt_failed(LOST, admitted=True, at_once=False)
    assert [level for level, _ in lines(told)] == ["INFO", "WARNING"]
    assert "no etcd here" in log_events(told.records)[-1].fields["error"]


def test_a_lost_owner_without_a_successor_is_a_warning(told: pytest.LogCaptureFixture) -> None:
    """It lost the run, and knows no new owner: there may be none."""
    of_several().attempt_failed(not_owner(), admitted=True, at_once=False)
    assert [level for level, _ in lines(told)] == ["WARNING"]


def test_before_admission_only_a_long_outage_is_logged(told: pytest.LogCaptureFixture) -> None:
    """Redirects are part of joining; an error from a replica that answered is more useful than a connection error."""
    outage = Outage(ALL)
    outage.attempt_failed(NO_ETCD, admitted=False, at_once=True)
    assert lines(told) == []
    outage.attempt_failed(LOST, admitted=False, at_once=False)
    assert lines(told) == [("WARNING", "no answer yet, trying again")]
    assert "no etcd here" in log_events(told.records)[0].fields["error"]


def test_one_service_alone_is_lost_once(told: pytest.LogCaptureFixture) -> None:
    outage = Outage("a:1")
    outage.over("a:1", replicated=False)
    for _ in range(3):
        outage.attempt_failed(LOST, admitted=True, at_once=False)
    assert lines(told) == [("WARNING", "rendezvous service lost, trying to reach it")]
