"""The output of a run's workers, read from the agents of all its hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity, SettingError
from rallypoint.rpc.runtime_folder import is_served, secret_beside
from rallypoint.submission.following import LogPieces, Lost


@dataclass(frozen=True, slots=True)
class LogSource:
    """An agent whose workers are to be read.

    Attributes:
        address: Address of its SupervisorService.
        ranks: Global ranks of the workers now; empty: all.
    """

    node: str
    address: str
    ranks: tuple[int, ...]


class RunLogs:
    """Reads the output of a run's workers, of each host and worker once."""

    def __init__(
        self,
        request: pb.StreamLogsRequest,
        security: ClientSecurity,
        timeout: float,
        take: Callable[[str, pb.StreamLogsResponse], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        """Store the settings.

        Args:
            request: The logs to read; its ranks are global.
            security: How connections to agents of other hosts are secured.
            timeout: Seconds that an agent which has replied may be unreachable.
            take: Called with the node and each piece of its output, in order.
            note: Called with sentences about hosts that can't be read.
        """
        self._request, self._security, self._timeout = request, security, timeout
        self._take, self._note = take, note
        self._found: set[tuple[str, int]] = set()  # nodes and local ranks

    def find(self, run: rendezvous_pb.Run) -> Iterator[LogSource]:
        """Yield the agents of workers that were not found before, by rank; note those that can't be reached."""
        wanted = set(self._request.ranks)
        for node in sorted(run.nodes, key=lambda node: node.assignment.base_rank):
            base = node.assignment.base_rank
            found = {
                (node.node_id, local_rank): base + local_rank
                for local_rank in range(node.local_world_size)
                if not wanted or (node.HasField("assignment") and base + local_rank in wanted)
            }
            new = found.keys() - self._found
            self._found |= new
            address = node.supervisor_address
            if not new:
                continue
            if not address or (address.startswith("unix:") and not is_served(address)):
                self._note(
                    f"{node.node_id} ({node.address}) is left out: its agent can be asked on its own host only; "
                    "--supervisor-address of `rallypoint run` makes it answer here"
                )
            else:
                ranks = tuple(sorted(found[key] for key in new)) if wanted else ()
                yield LogSource(node.node_id, address, ranks)

    async def read(self, source: LogSource) -> None:
        """Read from one agent, to the end of its stream or of the agent."""
        request = pb.StreamLogsRequest()
        request.CopyFrom(self._request)
        request.ranks[:] = source.ranks
        local = source.address.startswith("unix:")
        security = secret_beside(source.address) if local else self._security
        try:
            async with open_channel(source.address, security) as channel:
                stub = pb_grpc.SupervisorServiceStub(channel)
                pieces = LogPieces(stub, request, security, lambda: self._timeout if pieces.begun else 0.0)
                async for piece in pieces.read():
                    # A restart may give a worker another rank.
                    if not self._request.ranks or piece.rank in self._request.ranks:
                        await self._take(source.node, piece)
        except (Lost, SettingError) as error:
            self._note(f"{source.node} at {source.address}: the rest of its output is missing here: {error}")
