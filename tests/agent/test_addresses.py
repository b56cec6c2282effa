"""The address that others reach this host at is found without DNS, and the port that workers meet at is free."""

from __future__ import annotations

import socket

import pytest

from rallypoint.agent.addresses import free_port, local_address_towards
from rallypoint.serving.settings import SettingError


@pytest.mark.parametrize("endpoint", ["127.0.0.1:29400", "localhost:1", "[::1]:29400", "unix:/run/rdzv.sock"])
def test_towards_this_machine_it_is_the_loopback_address(endpoint: str) -> None:
    """All nodes of such a job are here."""
    assert local_address_towards(endpoint) == "127.0.0.1"


def test_towards_another_machine_it_is_the_address_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked which way it would go; nothing is sent, and no name is looked up in reverse."""
    asked: list[object] = []

    class Probe:
        def __init__(self, *kind: object) -> None:
            asked.append(kind)

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *error: object) -> None:
            asked.append("closed")

        def connect(self, address: object) -> None:
            asked.append(address)

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.7", 4711

    monkeypatch.setattr(socket, "socket", Probe)
    assert local_address_towards("192.0.2.1:29400") == "192.0.2.7"
    assert asked == [(socket.AF_INET, socket.SOCK_DGRAM, 17), ("192.0.2.1", 29400), "closed"]


def test_a_name_that_leads_home_is_the_address_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has a host's own name as 127.0.1.1 in its /etc/hosts; the others know it by that name."""
    here = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29400))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
    assert local_address_towards("head.example:29400") == "head.example"


def test_a_name_that_nobody_knows_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the endpoint, and the two flags that mend it."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SettingError) as caught:
        local_address_towards("nowhere.example:29400")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("nowhere.example:29400", "Name or service not known", "--rdzv-endpoint", "--local-addr"):
        assert part in text


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("node-3", socket.AF_INET)])
def test_a_free_port_can_be_listened_on(address: str, family: int) -> None:
    """It is free again when it is given out."""
    port = free_port(address)
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", port))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_free_port_of_an_ipv6_host_is_an_ipv6_port() -> None:
    """Workers bind the family of the master's address."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as taken:
        taken.bind(("::", free_port("::1")))


def test_of_several_endpoints_the_first_that_can_be_found_shows_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One on this host alone, or one whose name nobody knows just now, says nothing of how the others see it."""

    def resolve(host: str, port: int, **_: object) -> list[object]:
        if host == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert local_address_towards("127.0.0.1:1,gone.example:1,head.example:1") == "head.example"
    assert local_address_towards("gone.example:1,[::1]:1") == "127.0.0.1"
    assert local_address_towards("127.0.0.1:1,localhost:2") == "127.0.0.1"
