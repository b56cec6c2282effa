"""Whether an address can be listened on, and what is in the way if not."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from rallypoint.serving.endpoint import Endpoint
from rallypoint.serving.settings import PortInUseError, ServiceStartError


async def check_free(endpoint: Endpoint) -> None:
    """Tries the address before gRPC does.

    gRPC does not say why it fails, and takes a name of which one address is in use (localhost as ::1 and
    127.0.0.1) as long as another one is free.

    Raises:
        ServiceStartError: somebody listens there, or nobody could.
    """
    if endpoint.path is not None:
        _check_socket_free(endpoint, endpoint.path)
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ServiceStartError(
            f"cannot find the address of {endpoint.host} ({error.strerror}): change --host"
        ) from None
    failures = [_attempt(family, place) for family, _, _, _, place in found]
    if errno.EADDRINUSE in failures:
        raise PortInUseError(f"{endpoint} is in use: choose another --port, or stop what listens there")
    if errno.EACCES in failures:
        raise ServiceStartError(f"no permission to listen on {endpoint}: choose a --port from 1024 up")
    if None not in failures:
        reason = os.strerror(failures[0] or 0)
        raise ServiceStartError(f"{endpoint.host} is no address of this machine ({reason}): change --host")


def _attempt(family: int, place: tuple[object, ...]) -> int | None:
    """Binds and lets go at once. The errno of what is in the way, or None."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of an earlier server that the kernel still remembers are not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error.errno
    return None


def _check_socket_free(endpoint: Endpoint, path: str) -> None:
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServiceStartError(
            f"cannot make a socket in {folder}: no such folder or no permission (--host {endpoint})"
        )
    if not os.path.lexists(path):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except ConnectionRefusedError:
        # Left behind by a server that was killed; gRPC replaces it.
        return
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise ServiceStartError(
                f"cannot use {path} ({error.strerror}): change --host {endpoint}"
            ) from None
    raise ServiceStartError(f"{endpoint} is in use: choose another --host, or stop what listens there")
