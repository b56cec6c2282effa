"""torchrun's rendezvous at a Rallypoint service: `torchrun --rdzv-backend rallypoint`.

The handler imports no gRPC. It starts `rallypoint.torch.companion`, which is this host's node in the run, and talks to
it over a socket; that module describes the messages. docs/torchrun-plugin.md is for users.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from rallypoint.torch.process import ERRORS, SLACK, START_TIMEOUT, CompanionProcess
from rallypoint.torch.store import RoundStore

__all__ = ["RallypointRendezvousHandler"]

# Seconds that a torchrun that was stopped by a signal waits for the service to let its node go. Without that, the other
# nodes wait for the disconnect grace, which is 2 s by default.
_EXIT_TIMEOUT = 5.0
_NO_RUN_ID = "none"  # torchrun's default

_log = logging.getLogger(__name__)


class RallypointRendezvousHandler(RendezvousHandler):  # type: ignore[misc]  # torch has no types here
    """This host's node in a run, for torch's agent.

    The service notifies the companion of every change, so no method but `next_rendezvous`, `set_closed` and
    `shutdown` waits; these three wait no longer than the timeouts in `--rdzv-conf` allow. A service that is away, is
    restarted or moves to another replica is noticed by none of them, unless it stays away for longer than that.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Start the companion; it joins the run with the first `next_rendezvous`.

        Raises:
            ValueError: A parameter is invalid; one line.
            RendezvousConnectionError: The process does not start.
        """
        self._backend = parameters.backend
        self._run_id = parameters.run_id
        if not self._run_id or self._run_id == _NO_RUN_ID:
            raise ValueError(
                "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job"
            )
        # The latest messages of the companion.
        self._formed: dict[str, Any] | None = None
        self._over = ""
        self._ended: tuple[str, str] | None = None
        self._spare = False
        self._closed_reply: str | None = None
        self._ready: dict[str, Any] | None = None
        self._left: bool | None = None
        # `num_nodes_waiting` has returned the end of the round.
        self._noticed = False
        self._is_shut_down = False
        self._store: RoundStore | None = None
        self._companion = CompanionProcess()
        try:
            self._companion.send(
                "start",
                run_id=self._run_id,
                endpoint=parameters.endpoint,
                min_nodes=parameters.min_nodes,
                max_nodes=parameters.max_nodes,
                local_addr=parameters.local_addr or "",
                conf={key: str(value) for key, value in parameters.config.items()},
            )
            # It may wait for the name of the service to be resolvable.
            timeout = START_TIMEOUT + _seconds(parameters.get("read_timeout"), 60.0)
            if not self._wait(lambda: self._ready is not None or self._ended is not None, timeout):
                raise RendezvousConnectionError(f"Rallypoint's companion does not start within {timeout:g} s")
            self._raise_if_ended()
        except BaseException:
            self._companion.end()
            raise
        assert self._ready is not None
        self._patience: float = self._ready["patience"]
        self._close_timeout: float = self._ready["close_timeout"]
        atexit.register(_leave_at_exit, weakref.ref(self))

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return str(self._backend)

    @property
    def use_agent_store(self) -> bool:
        """False: the worker of rank 0 makes a TCPStore at MASTER_PORT, a new one in each round."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round with this node in it. No worker may be alive here.

        Raises:
            RendezvousClosedError: The run is closed, or this node was taken out of it.
            RendezvousGracefulExitError: The run succeeded while this node was a spare.
            RendezvousTimeoutError: Too few nodes came within `join_timeout`.
            RendezvousStateError: The run has other settings than this node.
            RendezvousConnectionError: The service did not reply in time, or refused this node.
        """
        # torch does not pass on why it calls. If nothing was to be noticed, its workers have failed.
        failed = self._formed is not None and not self._noticed
        self._formed, self._over, self._noticed = None, "", False
        self._forget_store()
        self._raise_if_ended()
        self._companion.send("rendezvous", failed=failed)
        while self._formed is None:
            # A spare waits for as long as the others run, as with torch.
            timeout = None if self._spare else self._patience
            if not self._wait_for_news(timeout):
                raise RendezvousConnectionError(
                    f"the rendezvous service sent nothing about the next round for {self._patience:g} s"
                )
            self._raise_if_ended()
        formed = self._formed
        rank, world_size = formed["rank"], formed["world_size"]
        _log.info("round %s of run '%s': rank %s of %s", formed["round"], self._run_id, rank, world_size)
        assert self._ready is not None
        path = self._ready["store"]
        self._store = RoundStore(path, formed["round"], rank, world_size, self._workers_succeeded)
        # Workers inherit them, as those of `rallypoint run` get them.
        os.environ.update(
            RALLYPOINT_RUN_ID=self._run_id,
            RALLYPOINT_NODE=self._ready["node"],
            RALLYPOINT_ROUND=str(formed["round"]),
            RALLYPOINT_FENCING_TOKEN=str(formed["token"]),
            RALLYPOINT_STORE_SOCKET=path,
        )
        address = RendezvousStoreInfo(formed["address"], formed["port"])
        return RendezvousInfo(self._store, rank, world_size, address)

    def is_closed(self) -> bool:
        """Return True if the run is closed to this node."""
        self._look()
        return self._ended is not None and self._ended[0] in ("closed", "graceful")

    def set_closed(self) -> None:
        """Close the run for all its nodes. torchrun never does; the service may permit it to operators only.

        Raises:
            RendezvousConnectionError: The service refused it, or did not reply within `close_timeout`.
        """
        if self.is_closed():
            return
        self._closed_reply = None
        self._companion.send("close", reason=f"set_closed() on {socket.gethostname()}")
        if not self._wait(lambda: self._closed_reply is not None, self._close_timeout + SLACK):
            raise RendezvousConnectionError(f"no reply within {self._close_timeout:g} s to close the run")
        if self._closed_reply:
            raise RendezvousConnectionError(f"the run is not closed: {self._closed_reply}")
        self._ended = self._ended or ("closed", "set_closed() has closed the run")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over, for any reason, else 0. torch's agent then calls `next_rendezvous`.

        A round ends for a lost or leaving node, a newcomer that the run lets in, a failed worker on another node, and
        an operator's request. Restarts for it do not count.

        Raises:
            RendezvousConnectionError: The companion is dead.
        """
        self._look()
        if self._formed is None or self._is_shut_down or not (self._over or self._ended):
            return 0
        if not self._noticed:
            detail = self._over or (self._ended or ("", ""))[1]
            _log.warning("round %s is over: %s", self._formed["round"], detail)
        self._noticed = True
        return 1

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return str(self._run_id)

    def shutdown(self) -> bool:
        """Leave the run, and end the companion; return True if the service took note within `close_timeout`.

        torchrun calls it after success and failure alike, while the exception of a failure is on its way. A node whose
        workers succeeded ends no other: those go on without it. A ChildFailedError means that no restart is left on
        this host: the run ends for all, unless another node was lost within the disconnect grace after it. Then, and
        after any other exception, the others form a round without this node.
        """
        error = sys.exc_info()[1]
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            described = {
                "rank": rank,
                "local_rank": failure.local_rank,
                "pid": failure.pid,
                "exit_code": failure.exitcode,
                "time": float(failure.timestamp),
                "message": str(failure.message),
            }
            return self._leave("failed", self._close_timeout, failure=described)
        return self._leave("succeeded" if error is None else "stopped", self._close_timeout)

    def _leave(self, result: str, timeout: float, **fields: object) -> bool:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._forget_store()
            with contextlib.suppress(RendezvousError):
                self._companion.send("shutdown", result=result, **fields)
                self._wait(lambda: self._left is not None, timeout + SLACK)
            self._companion.end()
            self._ended = self._ended or ("closed", "this node has left the run")
        return bool(self._left)

    def _forget_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _workers_succeeded(self) -> None:
        if not self._is_shut_down:
            self._companion.send("succeeded")

    # ---- Messages of the companion.

    def _look(self) -> None:
        """Take the messages that have arrived, without waiting."""
        if not self._is_shut_down:
            self._wait_for_news(0)

    def _wait(self, holds: Callable[[], bool], timeout: float) -> bool:
        """Return True as soon as a condition holds; False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait_for_news(left):
                return holds()
        return True

    def _wait_for_news(self, timeout: float | None) -> bool:
        """Take the messages that have arrived; wait for the first one. Return False after `timeout` seconds."""
        messages = self._companion.receive(timeout)
        for message in messages:
            self._take(message)
        return bool(messages)

    def _take(self, message: dict[str, Any]) -> None:
        match message["is"]:
            case "ready":
                self._ready = message
            case "waiting":
                self._spare = message["spare"]
            case "formed":
                self._formed, self._over, self._spare = message, "", False
            case "over":
                self._over = message["detail"] or "a new round is being formed"
            case "ended":
                self._ended = (message["how"], message["detail"])
            case "closed":
                self._closed_reply = message["error"]
            case "left":
                self._left = message["noted"]

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            how, detail = self._ended
            raise ERRORS[how](detail)


def _seconds(value: object, default: float) -> float:
    """A number in `--rdzv-conf`, which the companion checks."""
    try:
        return float(str(value))
    except ValueError:
        return default


def _leave_at_exit(reference: weakref.ref[RallypointRendezvousHandler]) -> None:
    """Leave when torchrun ends without `shutdown`, as after a signal: by then it has stopped its workers."""
    handler = reference()
    if handler is not None and handler._companion.is_ours:
        handler._leave("stopped", _EXIT_TIMEOUT)
