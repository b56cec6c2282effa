"""The address of this host that the others of its job see, also where their own is not known yet."""

from __future__ import annotations

import asyncio

from rallypoint.agent.addresses import local_address_towards
from rallypoint.rpc.endpoint import SettingError, parse_endpoints
from rallypoint.rpc.logs import get_logger

_FIRST_PAUSE = 0.1  # seconds, each twice as long as the one before
_LONGEST_PAUSE = 2.0

_log = get_logger("rallypoint.run")


async def own_address_towards(endpoint: str, patience: float) -> str:
    """Like `local_address_towards`, but asks again for a name that nobody knows.

    Orchestrators make a host's name known once that host runs. Whoever comes before it waits, as it does for a
    service that does not answer yet.

    Args:
        endpoint: Where the others are met.
        patience: Seconds after which the name is taken for a wrong one.

    Raises:
        SettingError: It can't be resolved, or no network leads there; one line.
    """
    if parse_endpoints(endpoint).loopback:
        return local_address_towards(endpoint)
    clock = asyncio.get_running_loop().time
    deadline = clock() + patience
    pause = _FIRST_PAUSE
    while True:
        try:
            return await asyncio.to_thread(local_address_towards, endpoint)
        except SettingError as error:
            if (left := deadline - clock()) <= 0:
                raise SettingError(f"{error} (asked again for {patience:g} s)") from None
            if pause == _FIRST_PAUSE:  # once, not with every attempt
                _log.warning(
                    "no way to the rendezvous yet, trying again", endpoint=endpoint, error=str(error)
                )
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
