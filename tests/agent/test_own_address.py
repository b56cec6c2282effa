"""The agent waits for a host whose name can't be resolved yet, as for one that does not answer yet."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rallypoint.agent.addresses import own_address_towards
from rallypoint.rpc.endpoint import SettingError


class Names:
    """A resolver that finds a name after a number of failed requests."""

    def __init__(self, questions: int) -> None:
        """Fail for this number of requests."""
        self.questions = questions
        self._resolve = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int, **attributes: Any) -> list[Any]:
        if self.questions:
            self.questions -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._resolve("127.0.0.1", port, **attributes)


async def test_a_name_that_resolves_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name exists once the pod runs; other pods may run before it."""
    names = Names(questions=3)
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    assert await own_address_towards("head.example:29501", timeout=600) == "head.example"
    assert names.questions == 0


async def test_a_name_that_never_resolves_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has one line and includes the time spent on retries."""
    monkeypatch.setattr(socket, "getaddrinfo", Names(questions=10**9).getaddrinfo)
    with pytest.raises(
        SettingError, match=r"head.example:29501: Name or .*--master-addr.*\(retried for 0.3 s\)"
    ):
        await own_address_towards("head.example:29501", timeout=0.3)


async def test_this_machine_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is resolved."""
    monkeypatch.setattr(socket, "getaddrinfo", Names(questions=10**9).getaddrinfo)
    assert await own_address_towards("localhost:29501", timeout=0) == "127.0.0.1"
