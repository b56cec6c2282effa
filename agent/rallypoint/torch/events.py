"""Events and logs of a stock torchrun in our form: `torchrun --event-log-handler=rallypoint --logs-specs=rallypoint`.

RALLYPOINT_EVENT_LOG_HANDLER names the destination of the events, as `rallypoint run --event-log-handler` does. torch
records the events; docs/metrics.md has their form here. Loaded in torchrun's process, so without gRPC.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from rallypoint.agent.events.handlers import EventDelivery, EventSink, open_event_log
from rallypoint.agent.events.recorder import AgentEvent, JobIdentity, Source
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger

__all__ = ["DESTINATION_VARIABLE", "RallypointLogsSpecs", "record_event"]

DESTINATION_VARIABLE = "RALLYPOINT_EVENT_LOG_HANDLER"
"""The environment variable with the destination, in the form of `--event-log-handler`."""

# Seconds that the end of torchrun waits for the last events to be delivered.
_LAST_EVENTS = 2.0

_log = get_logger("rallypoint.torch")


class RallypointLogsSpecs(DefaultLogsSpecs):  # type: ignore[misc]  # torch has no types here
    """torch's files of logs, but each start of the workers has a folder of its own: `attempt_0`, `attempt_1`, ...

    torch names the folder for the restart count, and deletes it if the workers start again for another reason, such as
    a newcomer. The event LOGS has the paths of each worker.
    """

    _attempts = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of workers that are about to start, by local rank; `envs`: their environments."""
        counts = {rank: env.get("TORCHELASTIC_RESTART_COUNT") for rank, env in envs.items()}
        # torch's numbering is by this variable. It is restored: workers read it as well.
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._attempts)
        try:
            destinations = super().reify(envs)
        finally:
            for rank, count in counts.items():
                if count is None:
                    del envs[rank]["TORCHELASTIC_RESTART_COUNT"]
                else:
                    envs[rank]["TORCHELASTIC_RESTART_COUNT"] = count
        self._attempts += 1
        for rank, env in envs.items():
            streams = {"stdout": destinations.stdouts[rank], "stderr": destinations.stderrs[rank]}
            _deliver(
                _event(
                    "LOGS",
                    Source.WORKER,
                    env.get("TORCHELASTIC_RUN_ID", ""),
                    env.get("ROLE_NAME", ""),
                    restart_count=int(counts[rank] or 0),
                    rank=int(env.get("RANK", rank)),
                    local_rank=rank,
                    error_file=destinations.error_files[rank],
                    **{name: path for name, path in streams.items() if path},
                )
            )
        return destinations


def record_event(serialized: str) -> None:
    """Deliver an event in torch's form, which is one JSON object. Never raises, and never waits."""
    try:
        event = _translated(json.loads(serialized))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("an event of torch has another form than expected", reason=repr(error))
        return
    _deliver(event)


def _translated(event: Mapping[str, Any]) -> AgentEvent:
    known = event["metadata"]
    # Further fields are JSON within JSON, each of a worker in a list of one.
    further = {
        name: value[0] if isinstance(value, list) else value
        for name, value in json.loads(known["metadata"]).items()
    }
    code, error = further.pop("exit_code", None), known.get("raw_error")
    pid = further.pop("worker_pid", None) or known.get("worker_id")
    details = {
        "rank": known.get("global_rank"),
        "pid": int(pid) if pid is not None else None,
        "exit_code": code if code is None or code >= 0 else None,
        "signal": -code if code is not None and code < 0 else None,
        "reason": error if error not in ("null", "{}") else None,
        "group_rank": known.get("group_rank"),
        **further,
    }
    milliseconds = known.get("duration_ms")
    return _event(
        str(event["name"]).rpartition(".")[2],
        Source(event["source"]),
        known["run_id"],
        known["role"],
        restart_count=known["agent_restarts"],
        duration=milliseconds / 1000 if milliseconds is not None else None,
        **{name: value for name, value in details.items() if value is not None},
    )


def _event(
    name: str,
    source: Source,
    run_id: str,
    role: str,
    *,
    restart_count: int,
    duration: float | None = None,
    **details: Any,
) -> AgentEvent:
    # Our rendezvous handler sets both variables, in this process.
    node = os.environ.get("RALLYPOINT_NODE") or socket.gethostname()
    return AgentEvent(
        name,
        source,
        time.time(),
        JobIdentity(run_id, node, role, None),
        int(os.environ.get("RALLYPOINT_ROUND", "0")),
        restart_count,
        duration,
        details,
    )


@functools.cache
def _delivery() -> EventDelivery:
    """Open the destination, once."""
    sinks: list[EventSink] = []
    try:
        sink = open_event_log(os.environ.get(DESTINATION_VARIABLE, ""))
    except SettingError as error:
        _log.error("torchrun's events are not recorded", variable=DESTINATION_VARIABLE, reason=str(error))
    else:
        sinks = [sink] if sink is not None else []
    delivery = EventDelivery(sinks)
    atexit.register(delivery.close, _LAST_EVENTS)
    return delivery


def _deliver(event: AgentEvent) -> None:
    _delivery()(event)
