"""Times are read in the usual notations, and shown such that they can be read back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from rallypoint.cli.output import parse_moment, show_moment, show_span

NOW = datetime(2026, 11, 20, 14, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is not UTC."""
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("2d", NOW - timedelta(days=2)),
        ("0s", NOW),
        ("2026-11-20T13:00:00Z", NOW - timedelta(hours=1)),
        ("2026-11-20T13:00+01:00", NOW - timedelta(hours=2)),
        ("2026-11-20T19:30", NOW),
        ("2026-11-20 19:30:00.250", NOW + timedelta(milliseconds=250)),
    ],
)
def test_a_time_is_an_age_or_an_iso_time(text: str, moment: datetime) -> None:
    """It is local time unless it names a zone."""
    assert parse_moment(text, NOW) == moment


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-10m", "10 m", "10y", "yesterday", "14:08", "999999999d", "٣m"]
)
def test_an_invalid_time_is_refused_with_the_expected_form(text: str) -> None:
    """The error quotes the text."""
    with pytest.raises(ValueError, match="is not a time; expected an age, as in 90s") as error:
        parse_moment(text, NOW)
    assert repr(text) in str(error.value)


def test_a_shown_moment_is_read_back() -> None:
    """The times in the output of `events` can be given to --since."""
    shown = show_moment(NOW.timestamp() + 0.25)
    assert shown == "2026-11-20 19:30:00.250"
    assert parse_moment(shown, NOW) == NOW + timedelta(milliseconds=250)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.000s"),
        (0.2044, "0.204s"),
        (59.999, "59.999s"),
        (59.9996, "1m00s"),
        (3599.6, "1h00m"),
        (723, "12m03s"),
        (11_520, "3h12m"),
        (187_200, "2d04h"),
        (-1.5, "-1.500s"),
    ],
)
def test_a_span_is_shown_as_finely_as_matters(seconds: float, shown: str) -> None:
    """It is exact to the millisecond while a round re-forms, coarser if a job ran for days."""
    assert show_span(seconds) == shown
