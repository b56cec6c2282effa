"""What the members of a cluster say of themselves: too old, nearly full, in trouble."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdError, EtcdRefused, Reason
from rallypoint.etcd.v1 import maintenance_pb2

OLDEST = (3, 4, 0)
"""What we can work with at all."""

RECOMMENDED = (3, 6, 9)
"""Older ones have known faults, which we work around or which are rare."""

# etcd's default for --quota-backend-bytes, which servers before 3.6 don't tell.
_DEFAULT_QUOTA = 2 * 1024**3
_NEARLY_FULL = 0.8


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member. `version` empty: our user may not ask; `quota` 0: it doesn't say; `alarms` are for people."""

    version: str
    db_size: int
    quota: int
    alarms: tuple[str, ...]
    learner: bool


async def statuses(client: EtcdClient) -> dict[str, MemberStatus]:
    """Each member that answers, by its endpoint.

    Raises:
        EtcdUnavailable: None does.
        EtcdRefused: What answers is no etcd, or won't let us in.
    """
    members = client.members
    asked = [_status(client, index) for index in range(len(members.connections))]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[str, MemberStatus] = {}
    failure: EtcdError | None = None
    for connection, answer in zip(members.connections, answers, strict=True):
        if isinstance(answer, MemberStatus):
            found[connection.where] = answer
        elif isinstance(answer, EtcdError):
            failure = answer if failure is None or isinstance(answer, EtcdRefused) else failure
        else:
            raise answer
    if not found:
        assert failure is not None
        raise failure
    return found


async def _status(client: EtcdClient, index: int) -> MemberStatus:
    members = client.members
    connection = members.connections[index]
    await connection.ready(members.attempt_timeout)
    try:
        response = await members.call(
            connection,
            "/etcdserverpb.Maintenance/Status",
            maintenance_pb2.StatusRequest(),
            maintenance_pb2.StatusResponse,
            timeout=members.attempt_timeout,
            # A member that has none still knows its version.
            leader=False,
        )
    except EtcdRefused as error:
        if error.reason is not Reason.PERMISSION_DENIED:
            raise
        # Late releases of 3.5 answer that to root only.
        return MemberStatus("", 0, 0, (), learner=False)
    alarms = tuple(text.strip() for text in response.errors if "alarm" in text)
    return MemberStatus(
        response.version, response.db_size, response.db_size_quota, alarms, learner=response.is_learner
    )


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The numbers of a version like 3.6.0-rc.1; None: it is none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def advice(found: dict[str, MemberStatus]) -> list[str]:
    """What an operator should be told of the members, one line each.

    Raises:
        EtcdRefused: One is older than what we can work with.
    """
    lines: list[str] = []
    for where, status in found.items():
        version = parse_version(status.version)
        if version is not None and version < OLDEST:
            raise EtcdRefused(
                Reason.NOT_ETCD, f"{where}: etcd {status.version} is too old: 3.4 or newer is needed"
            )
        if not status.version:
            lines.append(
                f"{where}: this user may not ask etcd for its version: see that it is 3.6.9 or newer"
            )
        elif version is None or version < RECOMMENDED:
            lines.append(
                f"{where}: etcd {status.version} is older than recommended: upgrade to 3.6.9 or newer"
            )
        quota = status.quota or _DEFAULT_QUOTA
        if status.db_size > _NEARLY_FULL * quota:
            lines.append(
                f"{where}: the database has {status.db_size >> 20} MiB of {quota >> 20} MiB, at which etcd takes no"
                " more writes: compact and defragment it, or raise --quota-backend-bytes"
            )
        if status.learner:
            lines.append(f"{where}: this member is a learner, which answers few requests: name a voting one")
        lines.extend(f"{where}: etcd has raised an alarm: {alarm}" for alarm in status.alarms)
    return lines


async def check_versions(client: EtcdClient) -> list[str]:
    """Look at every member that answers; what an operator should be told, one line each.

    Raises:
        EtcdUnavailable: None answers.
        EtcdRefused: One is too old, or won't let us in.
    """
    return advice(await statuses(client))
