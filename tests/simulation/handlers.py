"""The handlers of a service as its server calls them: registered by generated code, wrapped by the interceptor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from rallypoint.serving.interceptor import CallInterceptor


class _Registry:
    """A stand-in for the server with which generated code registers handlers."""

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
    """The details of a call that interceptors read."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


async def handlers_of(add: Callable[[Any], None], calls: CallInterceptor) -> dict[str, Any]:
    """Return the handlers that `add` registers, by method, each wrapped by the interceptor."""
    registry = _Registry()
    add(registry)
    wrapped = {}
    for method, handler in registry.handlers.items():

        async def found(_: object, handler: Any = handler) -> Any:
            return handler

        details: Any = _Details(method)
        wrapped[method] = await calls.intercept_service(found, details)
    return wrapped
