"""The handlers of store and fenced state, which pass every request and response to `StoreTruth`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from simulation.store_truth import StoreTruth

_MODULES = {"StoreService": pb, "StateService": state_pb}


def judge_stores(handlers: dict[str, Any], truth: StoreTruth) -> None:
    """Replace the handlers of unary calls of store and fenced state by ones that report to `truth`."""
    for method, handler in handlers.items():
        service, _, name = method.rpartition(".")[2].partition("/")
        if service in _MODULES and handler.unary_unary is not None:
            request, answer = (getattr(_MODULES[service], f"{name}{end}") for end in ("Request", "Response"))
            handlers[method] = grpc.unary_unary_rpc_method_handler(
                _judged(handler.unary_unary, handler, request, answer, truth),
                handler.request_deserializer,
                handler.response_serializer,
            )


def _judged(
    serve: Callable[[Any, Any], Awaitable[Any]],
    handler: Any,
    request_type: Any,
    answer_type: Any,
    truth: StoreTruth,
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def judged(request: Any, context: Any) -> Any:
        asked = truth.asked(request if handler.request_deserializer else request_type.FromString(request))
        answer = await serve(request, context)
        if context.code() is None:
            # The response is sent in the same step.
            truth.answered(
                asked, answer if isinstance(answer, answer_type) else answer_type.FromString(answer)
            )
        elif context.details().startswith("nothing was done"):
            truth.undone(asked)
        return answer

    return judged
