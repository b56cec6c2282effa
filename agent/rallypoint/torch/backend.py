"""A backend for torch's own DynamicRendezvousHandler: its state is fenced state of a Rallypoint service.

For programs that construct that handler. torchrun has a better way: `rallypoint.torch.handler`.

    backend = RallypointRendezvousBackend("rendezvous.example:29400", "job-17")
    handler = DynamicRendezvousHandler.from_backend("job-17", store, backend, min_nodes=2, max_nodes=4)
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from rallypoint.torch.process import ERRORS, SLACK, START_TIMEOUT, CompanionProcess

__all__ = ["RallypointRendezvousBackend"]


class RallypointRendezvousBackend(RendezvousBackend):  # type: ignore[misc]  # torch has no types here
    """The state of one rendezvous, under a fencing token.

    A call waits for a service that is away, restarts, or moves to another replica, for `read_timeout` (60 s), and takes
    effect once however often it is repeated meanwhile. torch's handlers remove nodes whose last heartbeat is old: have
    `keep_alive_interval` times `keep_alive_max_attempt` exceed the longest outage that they are to survive.

    gRPC is in a companion process, so the caller may fork. All methods are thread-safe; a fork can't call them.
    """

    def __init__(self, endpoint: str, run_id: str, conf: Mapping[str, object] | None = None) -> None:
        """Start the companion.

        Args:
            endpoint: Of the service, or of its replicas, separated by commas.
            run_id: Name of the rendezvous.
            conf: `read_timeout` in seconds, and the keys about security; docs/torchrun-plugin.md has them.

        Raises:
            ValueError: An argument is invalid; one line.
            RendezvousConnectionError: The companion does not start.
        """
        self._lock = threading.Lock()
        self._companion = CompanionProcess()
        try:
            texts = {key: str(value) for key, value in (conf or {}).items()}
            self._companion.send("open_state", endpoint=endpoint, run_id=run_id, conf=texts)
            self._read_timeout: float = self._reply(START_TIMEOUT)["read_timeout"]
        except BaseException:
            self._companion.end()
            raise

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "rallypoint"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its fencing token; None: there is no state.

        Raises:
            RendezvousConnectionError: The service did not reply in time, or refused the call.
        """
        reply = self._call("get_state")
        return None if reply["state"] is None else (_bytes(reply["state"]), _bytes(reply["token"]))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if `token` is its fencing token; without a token, set it if there is none.

        Returns:
            The state afterwards, its fencing token, and whether it is the one given; None: there is none.

        Raises:
            RendezvousConnectionError: The service did not reply in time, or refused the call. Whether the state was set
                is unknown.
        """
        if token and not isinstance(token, bytes):  # of another backend: it matches no state
            current = self.get_state()
            return None if current is None else (*current, False)
        reply = self._call("set_state", state=_text(state), token=_text(token) if token else None)
        if reply["state"] is None:
            return None
        return _bytes(reply["state"]), _bytes(reply["token"]), reply["has_set"]

    def close(self) -> None:
        """End the companion. The backend can't be used afterwards."""
        self._companion.end()

    def _call(self, do: str, **fields: object) -> dict[str, Any]:
        with self._lock:
            self._companion.send(do, **fields)
            return self._reply(self._read_timeout + SLACK)

    def _reply(self, timeout: float) -> dict[str, Any]:
        messages = self._companion.receive(timeout)
        if not messages:
            self._companion.end()  # a late reply must not be taken for that to the next call
            raise RendezvousConnectionError(f"Rallypoint's companion did not reply within {timeout:g} s")
        if messages[0]["is"] == "ended":
            raise ERRORS[messages[0]["how"]](messages[0]["detail"])
        return messages[0]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
