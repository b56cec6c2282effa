"""The network: connections that deliver in order and late, and that break, stall and lose messages in flight."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from simulation.clockwork import TICK, Clockwork, Process

# An item in flight: its kind and its content.
Item = tuple[str, Any]

# Seconds after which a connection to a peer that vanished is given up: keep-alive ping and its timeout, as in
# serving.channel.CLIENT_ARGUMENTS and serving.server.SERVER_ARGUMENTS.
CLIENT_NOTICES = (10.0, 15.0)
SERVER_NOTICES = (20.0, 30.0)
# gRPC's longest pause between two attempts to connect, and the longest duration of one. Seconds.
LONGEST_RECONNECT = 1.2
ATTEMPT = 5.0


@dataclass(slots=True, eq=False)
class Link:
    """The network path between a host and the service."""

    name: str
    latency: float
    up_blocked: bool = False
    down_blocked: bool = False
    # Seconds by which messages after the opening of a call are delayed.
    stalled: float = 0.0
    # Counts changes of the blocking, so that a delayed callback can check that it did not change in the meantime.
    epoch: int = 0

    @property
    def whole(self) -> bool:
        """True if it works in both directions."""
        return not (self.up_blocked or self.down_blocked)


class End(Protocol):
    """One end of a connection."""

    def receive(self, item: Item) -> None:
        """Take an item that arrives."""


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, network: Network, link: Link, up: bool, reader: Process, end: Callable[[], End | None]
    ) -> None:
        self._network = network
        self._link = link
        self._up = up
        self._reader = reader
        self._end = end
        self._flight: deque[Item] = deque()
        self._held = 0
        self._last = 0.0

    def send(self, item: Item) -> None:
        """Send an item."""
        self._flight.append(item)
        self._depart()

    def stall(self, seconds: float) -> None:
        """Delay all items that are sent from now on, by `seconds`."""
        self._last = max(self._last, self._network.clockwork.now + seconds)

    def cut(self, *, powerless: bool = False) -> None:
        """Lose the last items in flight; `powerless`: the sender is gone and does not resend over a blocked link."""
        keep = self._network.random.randint(0, len(self._flight))
        if powerless and (self._link.up_blocked if self._up else self._link.down_blocked):
            keep = 0
        while len(self._flight) > keep:
            self._flight.pop()

    def unblock(self) -> None:
        """Send the items that the blocked link held back."""
        held, self._held = self._held, 0
        for _ in range(held):
            self._depart()

    def _depart(self) -> None:
        network = self._network
        arrival = network.clockwork.now + self._link.latency * (0.5 + network.random.expovariate(2.0))
        self._last = max(self._last + TICK, arrival)
        network.clockwork.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._link.up_blocked if self._up else self._link.down_blocked:
            self._held += 1
        elif self._flight:
            item = self._flight.popleft()
            if self._reader.cpu is not None:
                self._reader.cpu.message(self._deliver, item)
            else:
                self._reader.call_soon(self._deliver, item)

    def _deliver(self, item: Item) -> None:
        end = self._end()
        if end is not None:
            end.receive(item)


@dataclass(slots=True, eq=False)
class Connection:
    """A connection with one call on it."""

    network: Network
    link: Link
    client: Process
    server: Process
    client_end: End
    accept: Callable[[Connection, str], End]
    # Limit of messages that the client has not taken; their number; True if the server waits for room.
    window: int
    untaken: int = 0
    starved: bool = False
    # True if it is broken; an end that does not know yet may still receive items in flight.
    broken: bool = False
    server_end: End | None = None
    up: Pipe = field(init=False)
    down: Pipe = field(init=False)
    # The ends that know that it is over.
    over: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.up = Pipe(self.network, self.link, True, self.server, self._server_end)
        self.down = Pipe(self.network, self.link, False, self.client, lambda: self.client_end)

    def _server_end(self) -> End:
        if self.server_end is None:
            self.server_end = _Opening(self)
        return self.server_end

    def unblock(self) -> None:
        """Resend the items lost on a link that works again. A suspended host's kernel sends nothing."""
        if not (self.link.up_blocked or self.client.suspended):
            self.up.unblock()
        if not (self.link.down_blocked or self.server.suspended):
            self.down.unblock()

    def taken(self) -> None:
        """The client took a message."""
        self.untaken -= 1
        if self.starved:
            self.starved = False
            self.up.send(("credit", None))

    def client_gives_up(self) -> None:
        """The client considers the connection broken."""
        self.broken = True
        self.client.call_soon(self.client_end.receive, ("gone", "keep-alive ping timed out"))
        self.up.cut()
        if self.network.random.random() < 0.5:
            self.up.send(("gone", None))
        else:  # that is lost as well: the server notices by its keep-alive, or by a newer stream of the same client
            self.network.leave_to_server(self)

    def server_gives_up(self) -> None:
        """The server considers the connection broken."""
        self.server.call_soon(self._server_end().receive, ("gone", None))
        self.down.cut()
        self.down.send(("gone", "connection reset by peer"))

    def reset(self) -> None:
        """Break the connection; both ends receive an error."""
        self.broken = True
        for pipe in (self.up, self.down):
            pipe.cut()
            pipe.send(("gone", "connection reset"))

    def ended(self, end: str) -> None:
        """Note that one end knows that the connection is over."""
        self.over.add(end)
        if len(self.over) == 2:
            self.network.connections.pop(id(self), None)


class _Opening:
    """The server's end before the method of the call is known."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self, item: Item) -> None:
        """Take the first item: it names the method."""
        kind, value = item
        if kind == "open":
            connection = self._connection
            connection.server_end = connection.accept(connection, value)
        elif kind == "gone":
            self._connection.ended("server")


class Listener(Protocol):
    """A server that accepts connections."""

    process: Process

    def accept(self, connection: Connection, method: str) -> End:
        """Accept a call."""


class Caller(End, Protocol):
    """The client's end, which opens a connection."""

    process: Process
    link: Link
    wait_for_ready: bool
    # The server to connect to: a key of `Network.listeners`.
    target: str

    @property
    def over(self) -> bool:
        """True if it has given up, or is done."""

    def connected(self, connection: Connection) -> None:
        """Take the new connection."""


class Network:
    """All connections, and their faults."""

    def __init__(self, clockwork: Clockwork, chance: random.Random) -> None:
        self.clockwork = clockwork
        self.random = chance
        # Servers by name; clients that know only one service use "".
        self.listeners: dict[str, Listener] = {}
        # Open connections by identity, in the order of connecting.
        self.connections: dict[int, Connection] = {}
        self.window = chance.choice([1, 3, 10])
        # Callers that wait for the server to accept a connection, and since when.
        self._knocking: dict[Caller, float] = {}
        # Processes that died with their hosts.
        self._vanished: set[Process] = set()

    @property
    def listener(self) -> Listener | None:
        """The server where there is only one service."""
        return self.listeners.get("")

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        if listener is None:
            self.listeners.pop("", None)
        else:
            self.listeners[""] = listener

    def listening(self, target: str) -> Listener | None:
        """Return the server of that name; None: no process listens."""
        return self.listeners.get(target)

    def dial(self, caller: Caller) -> None:
        """Connect a caller, with retries."""
        self._attempt(caller, self.clockwork.now)

    def _attempt(self, caller: Caller, since: float) -> None:
        link = caller.link
        self.clockwork.after(link.latency * self.random.uniform(0.5, 2.0), self._knock, caller, since)

    def _knock(self, caller: Caller, since: float) -> None:
        if caller.over or not caller.process.alive:
            return
        if caller.process.paused or not caller.link.whole:
            if self.clockwork.now < since + ATTEMPT or caller.wait_for_ready or caller.process.paused:
                self.clockwork.after(self.random.uniform(0.2, 1.0), self._attempt, caller, since)
            else:
                caller.process.call_soon(caller.receive, ("gone", "connection timed out"))
        elif (listener := self.listening(caller.target)) is not None and listener.process.paused:
            # Its kernel accepts the connection, and the process sends nothing: the attempt ends by its timeout.
            self.clockwork.after(self.random.uniform(0.2, ATTEMPT), self._attempt, caller, since)
        elif listener is not None:
            self._accept(caller, listener, since)
        elif caller.wait_for_ready:
            pause = self.random.uniform(0.1, LONGEST_RECONNECT)
            self.clockwork.after(pause, self._attempt, caller, since)
        else:
            caller.process.call_soon(caller.receive, ("gone", "connection refused"))

    def _accept(self, caller: Caller, listener: Listener, since: float) -> None:
        """Have the server accept a connection, at the cost of its CPU; if it dies before that, the caller retries."""
        cpu = listener.process.cpu
        if cpu is None or not cpu.costs.accept:
            self._connect(caller, listener)
            return
        self._knocking[caller] = since

        def accepted() -> None:
            if self._knocking.pop(caller, None) is not None and not caller.over and caller.process.alive:
                self._connect(caller, listener)

        cpu.accept(accepted)

    def _connect(self, caller: Caller, listener: Listener) -> None:
        connection = Connection(
            self, caller.link, caller.process, listener.process, caller, listener.accept, self.window
        )
        self.connections[id(connection)] = connection
        caller.connected(connection)

    def _those(self, which: Callable[[Connection], bool]) -> list[Connection]:
        return [each for each in self.connections.values() if which(each)]

    def block(self, link: Link, *, up: bool, down: bool) -> None:
        """Drop all traffic on a link; both ends notice by their keep-alive."""
        link.up_blocked, link.down_blocked = link.up_blocked or up, link.down_blocked or down
        link.epoch += 1
        epoch = link.epoch
        for connection in self._those(lambda each: each.link is link):
            self._notice(connection, lambda: link.epoch == epoch, client=True, server=True)

    def heal(self, link: Link) -> None:
        """Let a link work again; the lost items are resent."""
        link.up_blocked = link.down_blocked = False
        link.epoch += 1
        for connection in self._those(lambda each: each.link is link):
            connection.unblock()

    def resumed(self, process: Process) -> None:
        """A process continues: if its host was suspended, the host now resends the items that were lost."""
        for connection in self._those(lambda each: process in (each.client, each.server)):
            connection.unblock()

    def reset(self, link: Link) -> None:
        """Break all connections of a link."""
        for connection in self._those(lambda each: each.link is link):
            connection.reset()

    def paused(self, process: Process) -> None:
        """A process was stopped: its peers notice by their keep-alive, if the stop lasts long enough."""
        since = process.paused_since

        def still() -> bool:
            # A peer's keep-alive does not restart if the host goes during the stop (seed 120657260 of the replicas).
            gone = process.paused or process in self._vanished
            return gone and process.paused_since == since

        for connection in self._those(lambda each: process in (each.client, each.server)):
            self._notice(
                connection, still, client=process is connection.server, server=process is connection.client
            )

    def died(self, process: Process, *, silently: bool) -> None:
        """A process was killed. `silently`: with its host, so that peers receive nothing."""
        if self.listener is None:
            knocking, self._knocking = self._knocking, {}
            for caller, since in knocking.items():
                self._attempt(caller, since)
        for connection in self._those(lambda each: process in (each.client, each.server)):
            client_died = process is connection.client
            connection.ended("client" if client_died else "server")
            pipe = connection.up if client_died else connection.down
            if silently:
                self._vanished.add(process)
                pipe.cut(powerless=True)
                self._notice(connection, lambda: True, client=not client_died, server=client_died)
            else:
                connection.unblock()  # its host may have been suspended
                if self.random.random() < 0.5:
                    pipe.cut()
                pipe.send(("gone", "socket closed"))

    def leave_to_server(self, connection: Connection) -> None:
        """The server gets no message that a client has gone; only its keep-alive finds out."""
        self._notice(connection, lambda: True, client=False, server=True)

    def _notice(
        self, connection: Connection, still: Callable[[], bool], *, client: bool, server: bool
    ) -> None:
        def give_up(end: str, act: Callable[[], None]) -> None:
            if still() and end not in connection.over:
                act()

        if client:
            delay = self.random.uniform(*CLIENT_NOTICES)
            self.clockwork.after(delay, give_up, "client", connection.client_gives_up)
        if server:
            delay = self.random.uniform(*SERVER_NOTICES)
            self.clockwork.after(delay, give_up, "server", connection.server_gives_up)
