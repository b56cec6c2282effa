"""Asks the server in this container whether it serves (grpc.health.v1): exit code 0 if so, else 1 and one line why.

RALLYPOINT_HEALTH_ENDPOINT is where to ask. The connection is secured as that of any client of the container: by its run
secret (RALLYPOINT_RUN_SECRET, RALLYPOINT_RUN_SECRET_FILE), or not at all (RALLYPOINT_INSECURE). For a server with
certificates, RALLYPOINT_HEALTH_TLS_CA has those that must have signed the server's, which must hold the endpoint's host
name; a server that asks its clients for certificates (RALLYPOINT_TLS_CLIENT_CA) is shown its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, SettingError, client_security, run_secret

# Below the 5 s of the Dockerfile's HEALTHCHECK, so that it is this program that says what is wrong.
TIMEOUT = 4.0
# HealthCheckResponse{status: SERVING} on the wire. The request for the server as a whole is the empty message.
SERVING = b"\x08\x01"


def security() -> ClientSecurity:
    """How the connection is secured."""
    files = {
        name: Path(path) if (path := os.environ.get(f"RALLYPOINT_{name}")) else None
        for name in ("HEALTH_TLS_CA", "TLS_CLIENT_CA", "TLS_CERT", "TLS_KEY")
    }
    if files["HEALTH_TLS_CA"] is None:
        return client_security(None, run_secret(), insecure=bool(os.environ.get("RALLYPOINT_INSECURE")))
    if files["TLS_CLIENT_CA"] is None:
        return ClientTLS(files["HEALTH_TLS_CA"])
    return ClientTLS(files["HEALTH_TLS_CA"], files["TLS_CERT"], files["TLS_KEY"])


async def check(endpoint: str) -> None:
    """Returns if the server serves; exits with a sentence if not."""
    channel = open_channel(endpoint, security())
    method = channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
    )
    try:
        answer = await method(b"", timeout=TIMEOUT)
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{endpoint}: {error.code().name}: {error.details()}")
    finally:
        await channel.close()
    if answer != SERVING:
        sys.exit(f"{endpoint}: not serving")


if __name__ == "__main__":
    try:
        asyncio.run(check(os.environ.get("RALLYPOINT_HEALTH_ENDPOINT", "127.0.0.1:29400")))
    except SettingError as error:
        sys.exit(str(error))
