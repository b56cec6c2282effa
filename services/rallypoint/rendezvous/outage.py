"""What people are told of the time between two streams: once, that the rendezvous was lost, or that the run moved."""

from __future__ import annotations

from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.selector import MOVED, UNHEARD

_log = get_logger(__name__)


class Outage:
    """Tells of an outage when it begins, however many attempts it takes."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: where is looked for the service."""
        self._endpoint = endpoint
        self._at = ""
        self._sought = False
        self._begun = False
        self._told = False
        self._heard: ServiceError | None = None

    def over(self, at: str, *, sought: bool) -> None:
        """The service answered.

        Args:
            at: The address of who did.
            sought: Whether there are several replicas, among which the next one is looked for.
        """
        self._at = at
        self._sought = sought
        self._begun = self._told = False
        self._heard = None

    def goes_on(self, error: ServiceError, *, admitted: bool, at_once: bool) -> None:
        """A stream ended, or there was none.

        Args:
            error: With what.
            admitted: The node was in the run before.
            at_once: Somebody else is asked without a pause.
        """
        first, self._begun = not self._begun, True
        if error.reason not in UNHEARD:
            self._heard = error
        if self._told:
            return
        if admitted and self._sought and first:
            if _is_orderly(error):
                to = error.metadata.get("owner") or "not known yet"
                _log.info("the run moves to another replica", before=self._at, to=to)
                return
        elif at_once:
            return  # others are asked first
        self._told = True
        reason = _why(error if first else self._heard or error)
        if not admitted:
            _log.warning("no answer yet, trying again", endpoint=self._endpoint, error=reason)
        elif self._sought:
            what = "rendezvous replica lost, looking for the next owner of the run"
            _log.warning(what, replica=self._at, among=self._endpoint, error=reason)
        else:
            what = "rendezvous service lost, trying to reach it"
            _log.warning(what, endpoint=self._endpoint, error=reason)


def _why(error: ServiceError) -> str:
    """Why there is no stream. What is refused to clients in general is of no use to who reads of this one."""
    if error.reason not in MOVED:
        return str(error)
    if cause := error.metadata.get("cause"):
        return f"nobody owns it: {cause}"
    owner = error.metadata.get("owner")
    return f"{owner} is still named as its owner" if owner else "nobody is known to own it"


def _is_orderly(error: ServiceError) -> bool:
    """Whether who had the run says where it is now, or that it goes."""
    return error.reason == "DRAINING" or (error.reason in MOVED and "owner" in error.metadata)
