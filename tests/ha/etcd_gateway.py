"""etcd's JSON gateway: what a test asks etcd itself, and has it do, without any code of ours in between."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from typing import Any

# An http_proxy meant for the web would swallow it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EtcdSilent(Exception):
    """A member gave no answer, or refused."""


async def ask(endpoint: str, path: str, timeout: float, **fields: Any) -> dict[str, Any]:
    """POST to a member.

    Args:
        endpoint: `host:port` where it listens for clients.
        path: As `kv/range`.
        timeout: Seconds.
        fields: Of the request, as the gateway has them: bytes in base64.

    Raises:
        EtcdSilent: It did not answer, or refused.
    """
    return await asyncio.to_thread(_ask, endpoint, path, timeout, fields)


async def read(endpoint: str, prefix: str, timeout: float) -> dict[str, bytes]:
    """All keys with a prefix, and their values; linearizable.

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
