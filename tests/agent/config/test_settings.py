"""`--rdzv-conf`: known keys with valid values become the run's settings, anything else is a one-line error."""

from __future__ import annotations

import re

import pytest

from rallypoint.agent.config.settings import KNOWN_SETTINGS, RunSettingError, rendezvous_conf
from rallypoint.rendezvous.api import requests
from rallypoint.rendezvous.core.state import LONGEST
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


def test_counts_come_from_the_flags_and_times_from_the_pairs() -> None:
    """Other settings stay unset: the service has the defaults."""
    conf = rendezvous_conf(
        {
            "join_timeout": "60",
            "last_call_timeout": "0",
            "confirm_timeout": "0.25",
            "keep_alive_interval": "1e1",
            "keep_alive_max_attempt": "7",
            "scale_up_policy": "on-restart",
            "rank_policy": "topology",
            "reopen": "always",
            "scale_up_delay": "0",
        },
        (2, 4),
        3,
    )
    expected = pb.RunSettings(min_nodes=2, max_nodes=4, max_restarts=3, keep_alive_max_attempt=7)
    expected.join_timeout.FromSeconds(60)
    expected.last_call_timeout.FromSeconds(0)
    expected.confirm_timeout.FromMilliseconds(250)
    expected.keep_alive_interval.FromSeconds(10)
    expected.scale_up_policy = pb.SCALE_UP_POLICY_ON_RESTART
    expected.rank_policy = pb.RANK_POLICY_TOPOLOGY
    expected.reopen = pb.REOPEN_ALWAYS
    expected.scale_up_delay.FromSeconds(0)
    assert conf.settings == expected
    assert not conf.settings.HasField("disconnect_grace")


@pytest.mark.parametrize(
    ("shutdown", "pairs", "confirm"),
    [(30.0, {}, None), (5.0, {}, None), (300.0, {}, 600.0), (300.0, {"confirm_timeout": "400"}, 400.0)],
)
def test_workers_that_get_long_to_stop_get_long_to_confirm(
    shutdown: float, pairs: dict[str, str], confirm: float | None
) -> None:
    """A host that still stops its workers would be taken for lost, at every restart."""
    run_settings = rendezvous_conf(pairs, (1, 1), 0, shutdown).settings
    told = run_settings.confirm_timeout.ToSeconds() if run_settings.HasField("confirm_timeout") else None
    assert told == confirm


def test_the_agents_own_timeouts_are_no_part_of_the_run() -> None:
    """Nodes may have different values."""
    conf = rendezvous_conf({"read_timeout": "1.5", "close_timeout": "2"}, (1, 1), 0)
    assert (conf.read_timeout, conf.close_timeout) == (1.5, 2.0)
    assert conf.settings == pb.RunSettings(min_nodes=1, max_nodes=1)
    assert (rendezvous_conf({}, (1, 1), 0).read_timeout, rendezvous_conf({}, (1, 1), 0).close_timeout) == (
        60,
        30,
    )


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("join_timout", "1", "'join_timout' is not a setting; known: close_timeout"),
        ("join_timeout", "soon", "join_timeout='soon' is not a number of seconds"),
        ("join_timeout", "", "join_timeout='' is not a number of seconds"),
        ("join_timeout", "0", "out of range"),
        ("join_timeout", "-1", "out of range"),
        ("join_timeout", "nan", "out of range"),
        ("join_timeout", "inf", "out of range"),
        ("join_timeout", "1e12", "out of range"),
        ("last_call_timeout", "-0.1", "out of range"),
        ("keep_alive_max_attempt", "0", "whole number from 1"),
        ("keep_alive_max_attempt", "2.5", "whole number from 1"),
        ("keep_alive_max_attempt", "1001", "whole number from 1"),
        ("keep_alive_max_attempt", "²", "whole number from 1"),
        ("scale_up_policy", "maybe", "none of immediate, on-restart"),
        ("rank_policy", "random", "none of stable, sorted, topology"),
        ("reopen", "sometimes", "none of never, failed, always"),
        ("scale_up_policy", "unspecified", "none of immediate, on-restart"),
    ],
)
def test_an_invalid_setting_is_reported_in_one_line(key: str, value: str, told: str) -> None:
    """The line has the key, and its valid values."""
    with pytest.raises(RunSettingError) as caught:
        rendezvous_conf({key: value}, (1, 1), 0)
    assert told in str(caught.value)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_setting_that_is_taken_is_one_the_service_takes() -> None:
    """Neither side's bounds are wider than the other's, so no node is refused after its own flags allowed it."""
    largest = str(int(LONGEST))
    with pytest.raises(RunSettingError):
        rendezvous_conf({"join_timeout": str(LONGEST + 1)}, (1, 1), 0)
    named = {"keep_alive_max_attempt", "max_restarts_per_node", "scale_up_policy", "rank_policy", "reopen"}
    for key in set(KNOWN_SETTINGS) - named:
        for value in ("1200" if key == "keep_alive_interval" else largest, "0.001"):
            requests.run_settings(rendezvous_conf({key: value}, (1, 1), 0).settings)
    for attempts in ("1", "720"):
        requests.run_settings(rendezvous_conf({"keep_alive_max_attempt": attempts}, (1, 1), 0).settings)
    for of_node in ("0", "1", "10000"):
        conf = {"max_restarts_per_node": of_node, "restart_window": largest}
        requests.run_settings(rendezvous_conf(conf, (1, 1), 10_000).settings)


@pytest.mark.parametrize(
    ("pairs", "max_restarts", "named"),
    [
        ({"keep_alive_max_attempt": "721"}, 0, "may be at most 3600 s, not 3605"),
        ({"max_restarts_per_node": "3"}, 2, "max_restarts_per_node=3 has no effect"),
        ({"max_restarts_per_node": "three"}, 9, "max_restarts_per_node='three' is not a whole number"),
        ({"max_restarts_per_node": "9" * 5000}, 9, "' is not a whole number"),
        ({"max_restarts_per_node": "-1"}, 9, "max_restarts_per_node='-1' is not a whole number from 0"),
        ({"restart_window": "-5"}, 9, "restart_window=-5 is out of range; expected 0 to"),
        ({"restart_backoff": "soon"}, 9, "restart_backoff='soon' is not a number of seconds"),
        ({"restart_window": "600"}, 10_001, "--max-restarts may be at most 10000, not 10001"),
        ({"max_restarts_per_node": "1"}, 10_001, "--max-restarts may be at most 10000, not 10001"),
    ],
)
def test_budgets_that_make_no_sense_are_one_line(
    pairs: dict[str, str], max_restarts: int, named: str
) -> None:
    """They are rejected before anything is started, as the service would do."""
    with pytest.raises(RunSettingError, match=re.escape(named)) as caught:
        rendezvous_conf(pairs, (1, 1), max_restarts)
    assert "\n" not in str(caught.value)


def test_budgets_and_back_off_are_the_runs() -> None:
    """They are part of its settings; if they are unset, the service's defaults apply."""
    pairs = {"restart_window": "600", "restart_backoff": "0", "max_restarts_per_node": "2"}
    taken = requests.run_settings(rendezvous_conf(pairs, (1, 1), 5).settings)
    assert (taken.restart_window, taken.restart_backoff, taken.max_restarts_per_node) == (600.0, 0.0, 2)
    plain = requests.run_settings(rendezvous_conf({}, (1, 1), 5).settings)
    assert (plain.restart_window, plain.restart_backoff, plain.max_restarts_per_node) == (0.0, 30.0, 0)
