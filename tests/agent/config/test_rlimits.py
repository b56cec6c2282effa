"""Limits are parsed in the usual notations, and invalid ones are rejected before a worker is started."""

from __future__ import annotations

import resource

import pytest

from rallypoint.agent.config.rlimits import KNOWN, RlimitError, check_allowed, check_rlimits, parse_rlimit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nofile=65536", ("nofile", (65536, 65536))),
        ("core=0:unlimited", ("core", (0, -1))),
        ("core=unlimited", ("core", (-1, -1))),
        (" RLIMIT_STACK = 8M:16m ", ("stack", (8 << 20, 16 << 20))),
        ("memlock=-1", ("memlock", (-1, -1))),
        ("as=2T:infinity", ("as", (2 << 40, -1))),
    ],
)
def test_limits_are_read(text: str, expected: tuple[str, tuple[int, int]]) -> None:
    """A name, a soft value and an optional hard one, in the units of setrlimit(2)."""
    assert parse_rlimit(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nofile", "'nofile' is not a resource limit; expected NAME=SOFT"),
        ("=5", "'=5' is not a resource limit; expected"),
        ("files=5", "'files' is not a resource limit of this system; known: as, core"),
        ("nofile=many", "'nofile=many' has 'MANY', which is not a number; expected"),
        ("nofile=1:2:3", "has '2:3', which is not a number"),
        ("nofile=-2", "which is not a number"),
        ("nofile=10:5", "nofile=10:5: the soft limit must not be above the hard one"),
        ("nofile=unlimited:5", "nofile=unlimited:5: the soft limit must not be above"),
        ("as=99999999999999T", "too large for the kernel"),
    ],
)
def test_mistakes_are_reported_in_one_line(text: str, expected: str) -> None:
    """The error has the wrong part, and the expected form."""
    with pytest.raises(RlimitError) as caught:
        parse_rlimit(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_from_a_program_are_checked_as_well() -> None:
    """Numbers that were never text have the same bounds."""
    check_rlimits({"nofile": (5, 10), "core": (0, -1), "as": (-1, -1)})
    with pytest.raises(RlimitError, match="only -1"):
        check_rlimits({"nofile": (-7, 10)})
    assert {"nofile", "core", "as", "memlock", "nproc", "stack"} <= set(KNOWN)
    assert "ofile" not in KNOWN


def test_a_limit_that_the_kernel_would_refuse_is_refused_at_once() -> None:
    """The hard limit is above this process's own, also for root; this process keeps its limits."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(RlimitError, match=f"nofile=1000000000000: .* its hard limit, which is {before[1]};"):
        check_allowed({"nofile": (10, 10**12)})
    check_allowed({"nofile": (10, 20), "core": (0, 0)})
    check_allowed({"nofile": (before[0], before[1])})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
