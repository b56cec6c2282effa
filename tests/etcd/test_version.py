"""Advice about the members at the start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rallypoint.etcd.client import (
    RECOMMENDED,
    EtcdClient,
    MemberStatus,
    advice,
    check_versions,
    parse_version,
    statuses,
)
from rallypoint.etcd.errors import EtcdRefused, EtcdUnavailable, Reason
from support.etcd_server import PATIENT, EtcdCluster
from support.ports import free_port


def status(
    version: str = "3.6.9", size: int = 0, quota: int = 0, alarm: str = "", learner: bool = False
) -> MemberStatus:
    return MemberStatus(version, size, quota, (alarm,) if alarm else (), learner)


async def test_every_member_is_queried(connect: Callable[..., EtcdClient], trio: EtcdCluster) -> None:
    """Members that don't answer are left out, unless none does."""
    client = connect(f"{trio.url}?{PATIENT}")
    members = await statuses(client)
    assert set(members) == set(trio.endpoints.split(","))
    (version,) = {member.version for member in members.values()}
    numbers = parse_version(version)
    assert numbers is not None
    lines = await check_versions(client)
    assert len(lines) == (3 if numbers < RECOMMENDED else 0)
    trio.members[0].kill()
    assert set(await statuses(client)) == set(trio.endpoints.split(",")[1:])
    with pytest.raises(EtcdUnavailable):
        await statuses(connect(f"etcd://127.0.0.1:{free_port()}"))


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (status("3.6.9"), ""),
        (status("3.7.0-rc.1"), ""),
        (status("3.6.8"), "etcd 3.6.8 is older than recommended: upgrade to 3.6.9 or newer"),
        (status("3.4.0"), "older than recommended"),
        (status("what?"), "etcd what? is older than recommended"),
        (status(""), "may not read etcd's version"),
        (status(size=1700 << 20), "1700 MiB of 2048 MiB"),
        (status(size=1700 << 20, quota=8192 << 20), ""),
        (status(size=7000 << 20, quota=8192 << 20), "compact and defragment it"),
        (status(alarm="memberID:1 alarm:CORRUPT"), "has raised an alarm: memberID:1 alarm:CORRUPT"),
        (status(learner=True), "is a learner"),
    ],
)
def test_problems_of_a_member_are_reported(member: MemberStatus, said: str) -> None:
    """One line names the member; without a problem there is no line."""
    lines = advice({"a:2379": member})
    assert len(lines) == bool(said)
    assert all(line.startswith("a:2379: ") and said in line for line in lines)


def test_an_old_version_is_refused() -> None:
    """One such member is enough."""
    with pytest.raises(EtcdRefused, match=r"b:1: etcd 3.3.27 is too old: 3.4 or newer is needed") as refused:
        advice({"a:1": status(), "b:1": status("3.3.27")})
    assert refused.value.reason is Reason.NOT_ETCD
