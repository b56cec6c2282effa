"""Runs, and the nodes of a run, a page at a time: no answer outgrows a message or keeps the others waiting for long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from heapq import nsmallest
from itertools import chain

from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.reader import RunsReader
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.views import NODES_PER_MESSAGE, run_message, run_summary
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import count, text

# A summary takes some 50 us, so the largest page 50 ms in which the process does nothing else.
_MOST_RUNS = 1_000
_DEFAULT_RUNS = 200
# gRPC's clients take messages of 4 MiB; a run that a failure with its traceback ended has some 20 KiB.
_PAGE_BYTES = 3 * 1024 * 1024
_FRAME_BYTES = 8
_TOKEN_BYTES = 256


def check_list_runs(request: pb.ListRunsRequest) -> None:
    """Check a request for runs.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    count("page_size", request.page_size, 0, _MOST_RUNS)
    text("page_token", request.page_token, _TOKEN_BYTES)


def runs_page(request: pb.ListRunsRequest, runs: Iterable[RunState]) -> pb.ListRunsResponse:
    """A page of all runs, by name. The token is the name of the last run on it."""
    most = _most(request)
    later = (run for run in runs if run.run_id > request.page_token)
    response = pb.ListRunsResponse()
    room = _PAGE_BYTES
    for state in nsmallest(most + 1, later, key=lambda run: run.run_id):
        run = run_summary(state)
        room -= run.ByteSize() + _FRAME_BYTES
        if response.runs and (room < 0 or len(response.runs) == most):
            response.next_page_token = response.runs[-1].run_id
            break
        response.runs.append(run)
    return response


async def list_runs(request: pb.ListRunsRequest, readers: Sequence[RunsReader]) -> pb.ListRunsResponse:
    """A page of all runs of all readers, by name.

    Raises:
        NotOwner: Runs can't be read here any more.
    """
    if len(readers) == 1:
        return await readers[0].read_runs(partial(runs_page, request))
    # Names are cheap and summaries are not: whose come next is found out first.
    names = [await reader.read_runs(partial(_first_names, request)) for reader in readers]
    wanted = set(nsmallest(_most(request) + 1, chain.from_iterable(names)))
    pages = [
        await reader.read_runs(partial(_page_of, request, wanted.intersection(own)))
        for reader, own in zip(readers, names, strict=True)
        if not wanted.isdisjoint(own)
    ]
    return _merged(request, wanted, pages)


def _most(request: pb.ListRunsRequest) -> int:
    return request.page_size or _DEFAULT_RUNS


def _first_names(request: pb.ListRunsRequest, runs: Iterable[RunState]) -> list[str]:
    return nsmallest(_most(request) + 1, (run.run_id for run in runs if run.run_id > request.page_token))


def _page_of(request: pb.ListRunsRequest, wanted: set[str], runs: Iterable[RunState]) -> pb.ListRunsResponse:
    return runs_page(request, (run for run in runs if run.run_id in wanted))


def _merged(
    request: pb.ListRunsRequest, wanted: set[str], pages: Sequence[pb.ListRunsResponse]
) -> pb.ListRunsResponse:
    """One page out of several readers' pages of the `wanted` runs."""
    # Past the end of a page that is not the last, its reader has runs that nobody has seen.
    end = min((page.next_page_token for page in pages if page.next_page_token), default=None)
    runs = sorted((run for page in pages for run in page.runs), key=lambda run: run.run_id)
    response = pb.ListRunsResponse()
    room = _PAGE_BYTES
    for run in runs:
        room -= run.ByteSize() + _FRAME_BYTES
        full = len(response.runs) == _most(request) or (room < 0 and len(response.runs) > 0)
        if full or (end is not None and run.run_id > end):
            break
        response.runs.append(run)
    # Runs may have expired since their names were looked up.
    if len(response.runs) < len(runs) or end is not None or len(wanted) > _most(request):
        response.next_page_token = response.runs[-1].run_id if response.runs else max(wanted)
    return response


def first_node(request: pb.GetRunRequest) -> int:
    """Check a request for a run; return how many of its nodes were on the pages before.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    count("page_size", request.page_size, 0, NODES_PER_MESSAGE)
    token = request.page_token
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 10):
        raise invalid("page_token", "must be the next_page_token of the page before, or empty")
    return int(token)


def nodes_page(request: pb.GetRunRequest, state: RunState, first: int) -> pb.GetRunResponse:
    """A run with a page of its nodes: those after the `first` ones."""
    end = first + (request.page_size or NODES_PER_MESSAGE)
    more = end < len(state.nodes)
    return pb.GetRunResponse(run=run_message(state, first, end), next_page_token=str(end) if more else "")
