"""Requests from the wire to commands: every field is checked here, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from enum import IntEnum
from functools import partial
from heapq import nsmallest
from itertools import chain, islice
from typing import Any

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.api.events import check_entries
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import (
    LONGEST,
    LONGEST_LEASE,
    MOST_RESTARTS_KEPT,
    MOST_WORKERS_PER_NODE,
    FailureKind,
    Node,
    RecoveryParts,
    ReportedFailure,
    RunSettings,
    RunState,
)
from rallypoint.rendezvous.runs.run import (
    NODES_PER_MESSAGE,
    api_messages,
    node_messages,
    node_state,
    nodes_in_order,
    run_summary,
)
from rallypoint.rendezvous.shard.reader import RunsReader
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.errors import invalid
from rallypoint.rpc.text import clip_start, one_line
from rallypoint.serving.access import Caller
from rallypoint.serving.requests import (
    NAME_BYTES,
    PATH_BYTES,
    SENTENCE_BYTES,
    EveryField,
    count,
    items_before,
    name,
    page_position,
    page_size,
    page_token,
    seconds,
    text,
)

TRACEBACK_BYTES = 16 * 1024
# All settings together take less than half of this; a larger message has unknown fields, and is not worth caching.
_SETTINGS_BYTES = 512
# Settings without a default.
_NODE_COUNTS = ("min_nodes", "max_nodes")
# The latest time that can be formatted (year 10,000), unix seconds.
_LATEST = 253_402_300_000


def join_command(request: pb.JoinRun, caller: Caller) -> commands.Join:
    """Return the command of a `join` after checks.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    with EveryField() as check:
        check(name, "run_id", request.run_id)
        check(name, "node_id", request.node_id)
        check(_address, request.address)
        check(text, "supervisor_address", request.supervisor_address)
        check(text, "role", request.role)
        check(text, "topology", request.topology)
        check(text, "former_incarnation", request.former_incarnation)
        check(count, "local_world_size", request.local_world_size, 1, MOST_WORKERS_PER_NODE)
        settings = check(_settings_of, request.settings)
    assert settings is not None, "otherwise the context has raised"
    return commands.Join(
        node_id=request.node_id,
        settings=settings,
        address=request.address,
        local_world_size=request.local_world_size,
        role=request.role,
        topology=request.topology,
        supervisor_address=request.supervisor_address,
        identity=caller.name,
        client=caller.client,
        former_incarnation=request.former_incarnation,
    )


def _address(value: str) -> None:
    text("address", value)
    if not value:
        raise invalid("address", "must not be empty: it is how the other nodes reach this one")


def _settings_of(message: pb.RunSettings) -> RunSettings:
    """As `run_settings`, cached: all nodes of a run send the same settings."""
    encoded = message.SerializeToString()
    return _decoded_settings(encoded) if len(encoded) <= _SETTINGS_BYTES else run_settings(message)


@functools.lru_cache(maxsize=256)
def _decoded_settings(encoded: bytes) -> RunSettings:
    return run_settings(pb.RunSettings.FromString(encoded))


def run_settings(message: pb.RunSettings) -> RunSettings:
    """Return settings after checks, with the defaults for absent fields.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    with EveryField() as check:
        values = {field.name: check(_setting, message, field) for field in fields(RunSettings)}
    settings = RunSettings(**values)  # type: ignore[arg-type]
    of_run, of_node = settings.max_restarts, settings.max_restarts_per_node
    with EveryField() as check:
        if settings.max_nodes < settings.min_nodes:
            check.refuse(
                "settings.max_nodes",
                f"must be at least min_nodes ({settings.min_nodes}), not {settings.max_nodes}",
            )
        if settings.time_to_live > LONGEST_LEASE:
            check.refuse(
                "settings.keep_alive_interval",
                f"times keep_alive_max_attempt ({settings.keep_alive_max_attempt}) is the life of a lease, at most "
                f"{LONGEST_LEASE:g} s, not {settings.time_to_live:g}",
            )
        if of_node > of_run:
            check.refuse(
                "settings.max_restarts_per_node",
                f"must be at most max_restarts ({of_run}), past which the run ends, not {of_node}",
            )
        if of_run > MOST_RESTARTS_KEPT and (settings.restart_window or of_node):
            check.refuse(
                "settings.max_restarts",
                f"must be at most {MOST_RESTARTS_KEPT} with a restart_window or max_restarts_per_node, not {of_run}",
            )
    return settings


def _setting(message: pb.RunSettings, field: Field[Any]) -> Any:
    """Return a setting after a check of its range, or its default if it is absent."""
    if isinstance(field.default, float):
        if not message.HasField(field.name):  # type: ignore[arg-type]
            return field.default
        duration = getattr(message, field.name)
        return seconds(f"settings.{field.name}", duration, LONGEST, zero=field.metadata["zero"])
    sent = getattr(message, field.name)
    if isinstance(field.default, IntEnum):
        try:
            return type(field.default)(sent or field.default)
        except ValueError:
            raise invalid(f"settings.{field.name}", f"unknown policy {sent}") from None
    if not sent and field.name not in _NODE_COUNTS:
        return field.default
    count(f"settings.{field.name}", sent, field.metadata["least"], field.metadata["most"])
    return sent


def worker_failure(message: pb.WorkerFailure, node_id: str) -> ReportedFailure:
    """Return a failure report, shortened to the bounds of the protocol: an overlong report must not be lost."""
    kept = pb.WorkerFailure()
    kept.CopyFrom(message)
    kept.node_id = node_id
    kept.role = one_line(message.role, NAME_BYTES)
    kept.host = one_line(message.host, NAME_BYTES)
    kept.message = one_line(message.message, SENTENCE_BYTES)
    kept.log_file = one_line(message.log_file, PATH_BYTES)
    kept.core_file = one_line(message.core_file, PATH_BYTES)
    set_seconds(kept.age, _age(message.age))
    if message.kind not in {int(kind) for kind in FailureKind}:
        kept.ClearField("kind")  # of a newer agent
    if not (0 <= message.time.seconds < _LATEST and 0 <= message.time.nanos < 10**9):
        kept.ClearField("time")
    kept.traceback = clip_start(message.traceback, TRACEBACK_BYTES)
    return api_messages.from_message(kept, ReportedFailure)


def start_report(message: pb.ReportStart) -> StartReport:
    """Return a report about the start of a round after checks. Its age grows for as long as the round runs, and is cut.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    with EveryField() as check:
        check(count, "started.round", message.round, 1)
        parts = {
            part.name: check(
                seconds, f"started.parts.{part.name}", getattr(message.parts, part.name), LONGEST
            )
            for part in fields(RecoveryParts)
        }
    return StartReport(message.round, RecoveryParts(**parts), _age(message.age))  # type: ignore[arg-type]


def _age(sent: Duration) -> float:
    return min(max(0.0, to_seconds(sent)), LONGEST)


# ---- Runs, and the nodes of a run, a page at a time: so that no response is too large or delays others for long.


# A summary takes some 50 us, so the largest page blocks the process for 50 ms.
MOST_RUNS = 1_000
_DEFAULT_RUNS = 200
# gRPC's clients take messages of 4 MiB; a run that a failure with its traceback ended has some 20 KiB.
_PAGE_BYTES = 3 * 1024 * 1024
_FRAME_BYTES = 8


class RunsPage:
    """A page of all runs, by name. The token has the name of the last run on the page before."""

    def __init__(self, request: pb.ListRunsRequest) -> None:
        """Check a request.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
        """
        self._size = page_size(request.page_size, _DEFAULT_RUNS, MOST_RUNS)
        self._after = page_position(request, str)[0] if request.page_token else ""
        self._request = request

    def of(self, runs: Iterable[RunState]) -> pb.ListRunsResponse:
        """Return the page of some runs."""
        later = (run for run in runs if run.run_id > self._after)
        return self._filled(map(run_summary, nsmallest(self._size + 1, later, key=lambda run: run.run_id)))

    def _filled(self, runs: Iterable[pb.Run]) -> pb.ListRunsResponse:
        """Return a page of the first of these runs; its token is set if not all fit."""
        response = pb.ListRunsResponse()
        room = _PAGE_BYTES
        for run in runs:
            room -= run.ByteSize() + _FRAME_BYTES
            if response.runs and (room < 0 or len(response.runs) == self._size):
                response.next_page_token = page_token(self._request, response.runs[-1].run_id)
                break
            response.runs.append(run)
        return response

    async def read(self, readers: Sequence[RunsReader]) -> pb.ListRunsResponse:
        """Return the page of the runs of all readers.

        Raises:
            NotOwner: Runs can't be read here any more.
        """
        if len(readers) == 1:
            return await readers[0].read_runs(self.of)
        # Names are cheap and summaries are not: find the next names first.
        names = [await reader.read_runs(self._first_names) for reader in readers]
        wanted = set(nsmallest(self._size + 1, chain.from_iterable(names)))
        pages = [
            await reader.read_runs(partial(self._of_wanted, wanted.intersection(own)))
            for reader, own in zip(readers, names, strict=True)
            if not wanted.isdisjoint(own)
        ]
        return self._merged(wanted, pages)

    def _first_names(self, runs: Iterable[RunState]) -> list[str]:
        return nsmallest(self._size + 1, (run.run_id for run in runs if run.run_id > self._after))

    def _of_wanted(self, wanted: set[str], runs: Iterable[RunState]) -> pb.ListRunsResponse:
        return self.of(run for run in runs if run.run_id in wanted)

    def _merged(self, wanted: set[str], pages: Sequence[pb.ListRunsResponse]) -> pb.ListRunsResponse:
        """Merge several readers' pages of the `wanted` runs into one."""
        # Past the end of a page that is not the last, its reader has runs that are not in `pages`.
        end = min((page.runs[-1].run_id for page in pages if page.next_page_token), default=None)
        runs = [run for page in pages for run in page.runs if end is None or run.run_id <= end]
        response = self._filled(sorted(runs, key=lambda run: run.run_id))
        # Runs may have expired since their names were looked up.
        if end is not None or len(wanted) > self._size:
            last = response.runs[-1].run_id if response.runs else max(wanted)
            response.next_page_token = page_token(self._request, last)
        return response


class NodesPage:
    """A page of the nodes of a run that match a filter. The token has the number of nodes on the pages before."""

    def __init__(self, request: pb.ListNodesRequest) -> None:
        """Check a request.

        Raises:
            ServiceError: INVALID_ARGUMENT, naming the field.
        """
        self._size = page_size(request.page_size, NODES_PER_MESSAGE, NODES_PER_MESSAGE)
        self._request, wanted = request, request.filter
        with EveryField() as check:
            self._first = check(items_before, request) or 0
            check(check_entries, "filter.node_ids", wanted.node_ids, name)
            check(check_entries, "filter.states", wanted.states)
        self._node_ids, self._states = frozenset(wanted.node_ids), frozenset(wanted.states)
        self._connected = wanted.connected if wanted.HasField("connected") else None

    def read(self, state: RunState) -> pb.ListNodesResponse:
        """Return the page."""
        matching = filter(partial(self._matches, state), nodes_in_order(state))
        nodes = list(islice(matching, self._first, self._first + self._size))
        response = pb.ListNodesResponse(nodes=node_messages(state, nodes), revision=state.revision)
        if len(response.nodes) < len(nodes) or next(matching, None) is not None:
            response.next_page_token = page_token(self._request, self._first + len(response.nodes))
        return response

    def _matches(self, state: RunState, node: Node) -> bool:
        return (
            (not self._node_ids or node.node_id in self._node_ids)
            and (not self._states or node_state(state, node.node_id) in self._states)
            and (self._connected is None or node.connected == self._connected)
        )
