"""etcd's JSON gateway: requests that a test sends to etcd directly, without any code of the product."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from typing import Any

# No proxies: an http_proxy meant for the web can't reach the members.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EtcdSilent(Exception):
    """A member did not reply, or refused the request."""


async def ask(endpoint: str, path: str, timeout: float, **fields: Any) -> dict[str, Any]:
    """Send a POST request to a member, and return its reply.

    Args:
        endpoint: Its address for clients, `host:port`.
        path: The path, such as `kv/range`.
        timeout: Seconds.
        fields: The fields of the request in the form of the gateway: bytes in base64.

    Raises:
        EtcdSilent: It did not answer, or refused.
    """
    return await asyncio.to_thread(_ask, endpoint, path, timeout, fields)


async def read(endpoint: str, prefix: str, timeout: float) -> dict[str, bytes]:
    """Return all keys with a prefix, and their values, by a linearizable read.

    Raises:
        EtcdSilent: It did not answer, or refused.
    """
    key = prefix.encode()
    answer = await ask(
        endpoint, "kv/range", timeout, key=_base64(key), range_end=_base64(key[:-1] + bytes([key[-1] + 1]))
    )
    return {
        base64.b64decode(pair["key"]).decode(): base64.b64decode(pair.get("value", ""))
        for pair in answer.get("kvs", [])
    }


def _ask(endpoint: str, path: str, timeout: float, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{endpoint}/v3/{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise EtcdSilent(f"{endpoint} refuses {path}: {error.read().decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise EtcdSilent(f"{endpoint} does not answer {path}: {error}") from error


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
