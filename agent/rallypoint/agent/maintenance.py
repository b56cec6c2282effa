"""Hears from a user's program that the host is announced to go down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rallypoint.agent.side_programs import SidePrograms
from rallypoint.agent.spawn_protocol import SpawnError
from rallypoint.rpc.logs import get_logger

FIRST_PAUSE = 1.0
"""Seconds before a program that failed is started again; doubled each time."""

LONGEST_PAUSE = 60.0
"""Seconds; and a program that ran for so long before it failed is started again after FIRST_PAUSE. Clouds announce
maintenance two minutes ahead at the least."""

_log = get_logger("rallypoint.agent")


def next_pause(pause: float, ran: float) -> float:
    """Seconds before a program is started again.

    Args:
        pause: What the pause before this start was; 0: there was none.
        ran: Seconds that it ran.
    """
    return FIRST_PAUSE if ran >= LONGEST_PAUSE or not pause else min(2 * pause, LONGEST_PAUSE)


async def await_maintenance(
    program: Sequence[str], programs: SidePrograms, clock: Callable[[], float] = time.monotonic
) -> str:
    """Returns the reason once the host is announced to go down.

    Args:
        program: Program and arguments. It ends with exit code 0 when that is the case, and its first line of output
            is the reason. However else it ends, it is started again, after a pause.
        programs: Runs it.
        clock: Monotonic, in seconds.
    """
    pause = 0.0
    while True:
        began = clock()
        try:
            ended = await programs.run(program)
        except (SpawnError, OSError) as error:
            why = str(error)
        else:
            if ended.exit.succeeded:
                return ended.first_line or "the maintenance command announced it"
            number = ended.exit.signal
            how = f"ended by signal {number}" if number is not None else f"exit code {ended.exit.exit_code}"
            why = f"{ended.last_line} ({how})" if ended.last_line else how
        pause = next_pause(pause, clock() - began)
        _log.warning("the maintenance command failed; it is started again", reason=why, pause=pause)
        await asyncio.sleep(pause)
