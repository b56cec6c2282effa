"""What an agent is asked to run."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.agent.logs import Redirect
from rallypoint.agent.settings import EVIDENCE_TIMEOUT, SHUTDOWN_TIMEOUT
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from rallypoint.serving.channel import ClientTLS


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a service is: `host:port`, and certificates, None for plaintext."""

    endpoint: str
    tls: ClientTLS | None = None


@dataclass(frozen=True, slots=True)
class JobConfig:
    """A job, as one host runs it. Times are in seconds.

    Attributes:
        run_id: Name of the run.
        node_id: Name of this host's agent in it.
        address: Address at which the other hosts reach this one.
        settings: What all nodes of the run agree on.
        command: Program and arguments of a worker; `${local_rank}` in an argument is replaced.
        environment: Environment of the workers, less what the agent adds for each.
        rendezvous: Where the rendezvous service is.
        timer: Where the timer service is.
        local_world_size: Workers on this host.
        role: Role of the workers.
        topology: Where this host is, from the outermost place to the innermost, as in "hall2/rack7".
        working_directory: Of the workers; None: the agent's.
        log_dir: Where to make the folder of their output; None: a new temporary one.
        redirects: Streams that the console doesn't show.
        tee: Streams that the console shows with a prefix.
        connect_timeout: How long to try for a first answer of the rendezvous service.
        close_timeout: How long to try to give the lease back.
        shutdown_timeout: How long workers may take to stop before they are killed (torchrun's
            `--shutdown-timeout`). Shorter loses checkpoints; longer keeps every other host waiting.
        stall_after: Have the run reported when none of its workers advances for so long; 0: never; None: as the
            timer service is set.
        evidence_timeout: How long to look into a worker that hangs before it is killed; 0: not at all.
    """

    run_id: str
    node_id: str
    address: str
    settings: RunSettings
    command: tuple[str, ...]
    environment: Mapping[str, str]
    rendezvous: Peer
    timer: Peer
    local_world_size: int = 1
    role: str = "default"
    topology: str = ""
    working_directory: Path | None = None
    log_dir: Path | None = None
    redirects: Redirect = field(default_factory=Redirect)
    tee: Redirect = field(default_factory=Redirect)
    connect_timeout: float = 60.0
    close_timeout: float = 30.0
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    stall_after: float | None = None
    evidence_timeout: float = EVIDENCE_TIMEOUT


def new_node_id() -> str:
    """A name for this agent that no other has: host, process and a random part.

    A host may run several agents, and containers share process ids, so none of the parts would do alone.
    """
    return f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(3)}"
