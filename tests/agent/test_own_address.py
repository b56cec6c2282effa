"""A host whose name is not known yet is waited for, as one that does not answer yet is."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rallypoint.agent.addresses import own_address_towards
from rallypoint.rpc.endpoint import SettingError


class Names:
    """A resolver that learns a name after some questions."""

    def __init__(self, questions: int) -> None:
        """How many it can't answer."""
        self.questions = questions
        self._resolve = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int, **attributes: Any) -> list[Any]:
        if self.questions:
            self.questions -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._resolve("127.0.0.1", port, **attributes)


async def test_a_name_that_comes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name exists once the pod runs, and the others may be there before it."""
    names = Names(questions=3)
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    assert await own_address_towards("head.example:29501", timeout=600) == "head.example"
    assert names.questions == 0


async def test_a_name_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, with how long it was asked for."""
    monkeypatch.setattr(socket, "getaddrinfo", Names(questions=10**9).getaddrinfo)
    with pytest.raises(
        SettingError, match=r"head.example:29501: Name or .*--master-addr.*\(retried for 0.3 s\)"
    ):
        await own_address_towards("head.example:29501", timeout=0.3)


async def test_this_machine_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked."""
    monkeypatch.setattr(socket, "getaddrinfo", Names(questions=10**9).getaddrinfo)
    assert await own_address_towards("localhost:29501", timeout=0) == "127.0.0.1"
