"""What a replica is called, and where others reach it."""

from __future__ import annotations

import re
import socket

from rallypoint.rendezvous.replicas.layout import MOST_SHARDS
from rallypoint.rpc.endpoint import Endpoint, EndpointError, SettingError, parse_endpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SHARDS = re.compile(r"(?:^|&)shards=([^&]*)")


def split_shards(url: str) -> tuple[str, int | None]:
    """The URL of an etcd cluster without `shards=N` in its query, and that number; None: it names none.

    Raises:
        SettingError: It is no number of shards that there could be.
    """
    place, mark, query = url.partition("?")
    found = _SHARDS.findall(query)
    if not found:
        return url, None
    number = found[0]
    if len(found) > 1 or not (number.isascii() and number.isdigit() and 1 <= int(number) <= MOST_SHARDS):
        raise SettingError(f"--journal: shards={number!r}, expected one number from 1 to {MOST_SHARDS}")
    rest = _SHARDS.sub("", query).removeprefix("&")
    return place + (mark + rest if rest else ""), int(number)


def advertised_address(advertise: str, listening: str) -> str:
    """Where clients reach this replica.

    Args:
        advertise: What `--advertise` says; empty: where it listens, or by this machine's name if it listens at all
            of its addresses.
        listening: Where it listens, as `host:port` or `unix:/path`.

    Raises:
        SettingError: Nobody else could reach it there; one line.
    """
    if advertise:
        try:
            place = parse_endpoint(advertise)
        except EndpointError as error:
            raise SettingError(f"--advertise: {error}") from None
        if place.path is not None or _everywhere(place):
            raise SettingError(
                f"--advertise {advertise} is no address that others could connect to: give the host:port at which "
                "clients reach this machine"
            )
        return str(place)
    place = parse_endpoint(listening)
    if place.path is not None:
        raise SettingError(
            f"--host {listening} can't be reached from other machines: give --advertise HOST:PORT, or listen on TCP"
        )
    return str(Endpoint(socket.gethostname(), place.port)) if _everywhere(place) else str(place)


def _everywhere(place: Endpoint) -> bool:
    return place.host in ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)


def replica_name(name: str, address: str) -> str:
    """What a replica is called: `name`, or after its host and port.

    Raises:
        SettingError: That is no name.
    """
    if not name:
        port = parse_endpoint(address).port
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname()).lstrip('.-_') or 'replica'}-{port}"
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"--replica-name {name!r} is no name: expected up to 128 letters, digits, dots, dashes, colons and "
            "underscores, as in rendezvous-0"
        )
    return name
