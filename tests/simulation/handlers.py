"""A service's handlers as its server calls them: those that generated code registers, with the chassis around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from rallypoint.serving.interceptor import CallInterceptor


class _Registry:
    """What generated code takes for a server."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, services: Sequence[grpc.ServiceRpcHandler]) -> None:
        """Take the handlers of services."""
        for service in services:
            name = service.service_name()
            for method in descriptor_pool.Default().FindServiceByName(name).methods:
                path = f"/{name}/{method.name}"
                self.handlers[path] = service.service(_Details(path))


class _Details(grpc.HandlerCallDetails):
    """Of a call, what interceptors look at."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


async def handlers_of(add: Callable[[Any], None], calls: CallInterceptor) -> dict[str, Any]:
    """What `add` puts into a server, by the name of the method, each within the interceptor."""
    registry = _Registry()
    add(registry)
    wrapped = {}
    for method, handler in registry.handlers.items():

        async def found(_: object, handler: Any = handler) -> Any:
            return handler

        details: Any = _Details(method)
        wrapped[method] = await calls.intercept_service(found, details)
    return wrapped
