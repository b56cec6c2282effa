"""The clients of a run in a random history: agents, which follow updates, and watchers, which only read."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import require


@dataclass(eq=False, slots=True)
class Agent:
    """One life of one node's agent: the updates that it got, and the workers that it runs because of them."""

    node_id: str
    local_world_size: int
    role: str
    lease: int | None = None
    asked: bool = False
    connected: bool = False
    inbox: pb.NodeUpdate | None = None
    view: pb.NodeUpdate | None = None
    revision: int = 0
    workers_of: int | None = None
    # `stays`: it stays in a closed run until its workers are gone. `seen_at`: the time of the server's last sign of
    # life of it. `incarnation`: that of the run in which it was last.
    stays: bool = False
    seen_at: float = 0.0
    incarnation: str = ""

    def put(self, update: pb.NodeUpdate) -> None:
        self.inbox = update

    def read(self) -> None:
        """Take the latest update and follow it."""
        update, self.inbox = self.inbox, None
        if update is None:
            return
        require(update.revision >= self.revision, "revisions that a node sees only grow")
        if self.view is not None and update.revision == self.view.revision:
            require(update == self.view, "one revision is one state")
        self.view, self.revision = update, update.revision
        if update.phase == pb.PHASE_FINAL and update.HasField("assignment"):
            require(
                self.workers_of in (None, update.assignment.round), "the workers of an earlier round are gone"
            )
            self.workers_of = update.assignment.round
        else:
            self.workers_of = None

    def lose_lease(self) -> None:
        """The server refused the lease: drop everything that depends on it."""
        self.lease, self.connected, self.asked = None, False, False
        self.inbox = self.view = self.workers_of = None


@dataclass(eq=False, slots=True)
class Watcher:
    """A watcher, over any number of streams."""

    connected: bool = False
    inbox: pb.Run | None = None
    view: pb.Run | None = None

    @property
    def revision(self) -> int:
        return self.view.revision if self.view is not None else 0

    def read(self) -> None:
        update, self.inbox = self.inbox, None
        if update is not None:
            require(
                update.revision > self.revision, "revisions that a watcher sees grow, and none comes twice"
            )
            self.view = update
