"""The agent finds its own address without DNS, and the master port that it reserves stays free for its workers."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent import addresses
from rallypoint.agent.addresses import MasterPort, is_taken_by_another, local_address_towards
from rallypoint.rpc.endpoint import SettingError


@pytest.mark.parametrize("endpoint", ["127.0.0.1:29400", "localhost:1", "[::1]:29400", "unix:/run/rdzv.sock"])
def test_towards_this_machine_it_is_the_loopback_address(endpoint: str) -> None:
    """With such an endpoint all nodes of the job are on this host."""
    assert local_address_towards(endpoint) == "127.0.0.1"


def test_towards_another_machine_it_is_the_address_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel looks up the route; nothing is sent, and there is no reverse DNS lookup."""
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
    """Debian maps a host's own name to 127.0.1.1 in its /etc/hosts; other hosts resolve the name correctly."""
    here = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29400))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
    assert local_address_towards("head.example:29400") == "head.example"


def test_an_unknown_name_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the endpoint, and the two flags that solve the problem."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SettingError) as caught:
        local_address_towards("nowhere.example:29400")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("nowhere.example:29400", "Name or service not known", "--rdzv-endpoint", "--local-addr"):
        assert part in text


@pytest.fixture
def master_port() -> Iterator[MasterPort]:
    """The master port of an agent."""
    master_port = MasterPort()
    yield master_port
    master_port.close()


PLACES = [("0.0.0.0", socket.AF_INET), ("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)]  # noqa: S104


def can_be_bound(place: str, family: int, port: int, *options: int) -> bool:
    """Return True if a program can bind the port at an address, with these options of its socket."""
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        for option in options:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            taken.bind((place, port))
        except OSError:
            return False
        taken.listen()
        return True


@pytest.mark.parametrize(("place", "family"), PLACES)
def test_the_workers_port_is_theirs_alone(master_port: MasterPort, place: str, family: int) -> None:
    """No program can bind it before the workers start, with any socket option; then it can be bound without options."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = master_port.reserve()
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)):
        assert not can_be_bound(place, family, port, *options)
    master_port.hand_over()
    assert can_be_bound(place, family, port)


@pytest.mark.parametrize(("place", "family"), PLACES)
def test_a_port_that_a_program_has_is_not_given_to_workers(
    master_port: MasterPort, monkeypatch: pytest.MonkeyPatch, place: str, family: int
) -> None:
    """This holds for a program at any address: the address that the workers will bind is unknown."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    probe = MasterPort()
    one, other = probe.reserve(), probe.reserve()
    probe.close()
    monkeypatch.setattr(addresses, "_BANDS", [(one, other)])
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.bind((place, one))
        assert master_port.reserve() == other


def test_agents_of_one_host_never_choose_the_same_port(
    master_port: MasterPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds also when the workers of the first agent were started but have not bound their port yet.
    If no port is left, the kernel assigns one, and a warning is logged."""
    monkeypatch.setattr(addresses, "_BANDS", [free := _some_free(3)])
    others = [MasterPort() for _ in range(2)]
    ports = [each.reserve() for each in others]
    for each in others:
        each.hand_over()
    ports.append(master_port.reserve())
    assert sorted(ports) == sorted(free)
    others[0].close()
    assert master_port.reserve() == ports[0]
    assert not caplog.records
    others[0].reserve()
    assert others[0].reserve() not in free
    assert "net.ipv4.ip_local_reserved_ports" in caplog.text
    for each in others:
        each.close()


def _some_free(number: int) -> list[int]:
    chosen = [MasterPort() for _ in range(number)]
    ports = [each.reserve() for each in chosen]
    for each in chosen:
        each.close()
    return ports


@pytest.mark.parametrize(
    ("ephemeral", "reserved", "expected"),
    [
        ("32768\t60999", "", (61000, 65535)),
        ("32768\t60999", "61000-65000,65535", (65001, 65534)),
        ("15000 61000", "", (61001, 65535)),
        ("32768 65535", "", (20000, 29399)),
        ("29000 65535", "", (20000, 28999)),
        ("20000 65535", "", (10000, 19999)),
        ("1024 65535", "8080,61000-61009", (61000, 61009)),
    ],
)
def test_it_is_no_port_that_the_kernel_gives_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ephemeral: str, reserved: str, expected: tuple[int, int]
) -> None:
    """The kernel assigns unreserved ports of the ephemeral range to outgoing connections and to binds of port 0."""
    for name, text in (("_EPHEMERAL", ephemeral), ("_RESERVED", reserved)):
        tmp_path.joinpath(name).write_text(f"{text}\n")
        monkeypatch.setattr(addresses, name, tmp_path / name)
    ports = addresses._ports_of_no_other_use()
    assert (ports[0], ports[-1]) == expected


LISTENER = """
import socket, sys
listening = socket.create_server(("", 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_port_of_the_workers_is_not_taken_from_them() -> None:
    """Two workers that bind the same port have a bug of their own, which another port would not fix."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        port = int(program.stdout.readline())
        assert not is_taken_by_another(port, os.getpid())
        unrelated_pid = program.pid
        assert is_taken_by_another(port, unrelated_pid)
        program.communicate()
    assert not is_taken_by_another(port, unrelated_pid)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert is_taken_by_another(bound.getsockname()[1], unrelated_pid)


def test_of_several_endpoints_the_first_that_can_be_found_shows_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loopback address, or a name that can't be resolved now, does not lead to the address that others see."""

    def resolve(host: str, port: int, **_: object) -> list[object]:
        if host == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert local_address_towards("127.0.0.1:1,gone.example:1,head.example:1") == "head.example"
    assert local_address_towards("gone.example:1,[::1]:1") == "127.0.0.1"
    assert local_address_towards("127.0.0.1:1,localhost:2") == "127.0.0.1"
