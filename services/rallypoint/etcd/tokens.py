"""The token that goes along with the calls of a user: asked for once, and again when it has become invalid."""

from __future__ import annotations

import asyncio

from rallypoint.etcd.connection import Connection
from rallypoint.etcd.errors import EtcdError, EtcdRefused, EtcdUnavailable
from rallypoint.etcd.v1 import auth_pb2

_PATH = "/etcdserverpb.Auth/Authenticate"


class Tokens:
    """One token for all members: they share it, until it dies of age or one of them restarts."""

    def __init__(self, user: str, password: str) -> None:
        """`user` empty: calls go without."""
        self._user = user
        self._password = password
        # None: to be asked for. Empty: none is needed.
        self._token = None if user else ""
        self._asking: asyncio.Task[str] | None = None

    @property
    def has_user(self) -> bool:
        """Whether there can be another token."""
        return bool(self._user)

    async def get(self, connection: Connection, timeout: float, stale: str | None = None) -> str:
        """The token to call with; empty: without one.

        Args:
            connection: The member to ask, if that must be done.
            timeout: Seconds that it may take.
            stale: A token that was refused: not that one again.

        Raises:
            EtcdUnavailable: There is no answer. Nothing else was sent.
            EtcdRefused: UNAUTHENTICATED: no such user, or another password.
        """
        if self._token is not None and (self._token != stale or not self._user):
            return self._token
        if self._asking is None:
            # Checking a password takes a server a tenth of a second: once is enough for all that wait.
            self._asking = asyncio.ensure_future(self._ask(connection, timeout))
            self._asking.add_done_callback(self._asked)
        asking = self._asking
        done, _ = await asyncio.wait({asking}, timeout=timeout)
        if not done or asking.cancelled():
            raise EtcdUnavailable(f"{connection.where}: no token after {timeout:g} s", unsent=True)
        try:
            return asking.result()
        except EtcdRefused:
            raise
        except EtcdError as error:
            raise EtcdUnavailable(str(error), unsent=True) from None

    async def _ask(self, connection: Connection, timeout: float) -> str:
        request = auth_pb2.AuthenticateRequest(name=self._user, password=self._password)
        try:
            response = await connection.unary(_PATH, request, auth_pb2.AuthenticateResponse, timeout, ())
        except EtcdRefused as error:
            if "authentication is not enabled" not in str(error):
                raise
            # It was turned off, or isn't turned on yet; when it is, calls without a token are refused.
            return ""
        return str(response.token)

    def _asked(self, asking: asyncio.Task[str]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._token = asking.result()

    def close(self) -> None:
        """Let go of who waits."""
        if self._asking is not None:
            self._asking.cancel()
