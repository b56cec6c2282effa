"""Check the health of the server in this container (grpc.health.v1): exit code 0 if it serves, else 1 and the reason.

The server's address is RALLYPOINT_HEALTH_ENDPOINT. The connection is secured as any client's in the container: by the
run secret (RALLYPOINT_RUN_SECRET, RALLYPOINT_RUN_SECRET_FILE), or not at all (RALLYPOINT_INSECURE). For a server with
certificates, RALLYPOINT_HEALTH_TLS_CA holds the CA certificates to trust; the server's certificate must name the
endpoint's host. If the server requires client certificates (RALLYPOINT_TLS_CLIENT_CA), this program sends the server's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, SettingError, client_security, run_secret

# Below the 5 s of the Dockerfile's HEALTHCHECK, so that this program reports the error before it is killed.
TIMEOUT = 4.0
# HealthCheckResponse{status: SERVING} on the wire. The request for the server as a whole is the empty message.
SERVING = b"\x08\x01"


def security() -> ClientSecurity:
    """Return the security settings of the connection."""
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
    """Return if the server serves; else exit with an error message."""
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
