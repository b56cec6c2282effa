"""The error of a call, decoded as clients do it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc.aio
import pytest

from rallypoint.rpc.errors import ServiceError, decode


async def refusal(call: Awaitable[Any]) -> ServiceError:
    """Return the error that a call ends with; fail if it succeeds."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return decode(error.value)
