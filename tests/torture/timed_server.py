"""`rallypoint` that records how late each heartbeat takes effect: timed_server.py FILE ARGUMENTS.

A heartbeat has no response, so only the service knows when it takes effect. It carries the time at which it was
sent, by the clock that all processes of a machine share; FILE gets a line with the seconds since then.
"""

from __future__ import annotations

import sys
import time

from rallypoint.cli.main import main
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.run import Member

SENT = "sent at "
"""The beginning of a timed heartbeat's text; the seconds follow."""


def time_heartbeats(path: str) -> None:
    """Record the lateness of each timed heartbeat from now on; one that is sent again counts once."""
    notes = open(path, "w", encoding="ascii", buffering=1)  # noqa: SIM115 (open to the end of the process)
    renew, latest = RendezvousEngine.renew, dict[str, str]()

    def renew_and_note(engine: RendezvousEngine, member: Member, watchdog_trouble: str | None = None) -> None:
        renew(engine, member, watchdog_trouble)
        if watchdog_trouble and watchdog_trouble.startswith(SENT):
            if latest.get(member.node_id) != watchdog_trouble:
                notes.write(f"{time.monotonic() - float(watchdog_trouble.removeprefix(SENT)):.6f}\n")
            latest[member.node_id] = watchdog_trouble

    RendezvousEngine.renew = renew_and_note  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    time_heartbeats(sys.argv.pop(1))
    main()
