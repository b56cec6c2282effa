"""A name is replaced by all its addresses, keeps its name for certificates, and without addresses stays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rallypoint.rpc import address
from rallypoint.rpc.address import Address, has_name, listed_addresses
from rallypoint.rpc.endpoint import parse_endpoint, parse_endpoints
from support.waiting import PATIENCE


async def three(host: str, port: int) -> Sequence[str]:
    assert (host, port) == ("rdzv.example", 29400)
    return ["10.0.0.1", "2001:db8::2", "10.0.0.3"]


async def test_a_name_stands_for_all_its_addresses() -> None:
    """Addresses are left unchanged; one that is there twice, by name and by address, is listed once."""
    places = await listed_addresses(parse_endpoints("10.0.0.3:29400,rdzv.example:29400,unix:/run/x"), three)
    assert [str(each) for each in places] == [
        "10.0.0.3:29400",
        "10.0.0.1:29400",
        "[2001:db8::2]:29400",
        "unix:/run/x",
    ]
    assert [each.listed.host for each in places] == ["10.0.0.3", "rdzv.example", "rdzv.example", ""]


@pytest.mark.parametrize(
    "error", [OSError("Name or service not known"), TimeoutError(), UnicodeError("label too long")]
)
async def test_a_name_without_addresses_stands_for_itself(error: Exception) -> None:
    async def fail(host: str, port: int) -> Sequence[str]:
        raise error

    nowhere = parse_endpoint("nowhere.example:1")
    assert await listed_addresses(parse_endpoints("nowhere.example:1"), fail) == [Address.of(nowhere)]


async def test_a_silent_name_service_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the list are usable all the same."""
    monkeypatch.setattr(address, "RESOLVE_TIMEOUT", 0.05)

    async def hang(host: str, port: int) -> Sequence[str]:
        await asyncio.get_running_loop().create_future()
        return []

    async with asyncio.timeout(PATIENCE):
        places = await listed_addresses(parse_endpoints("a.example:1,10.0.0.1:1"), hang)
    assert [str(each) for each in places] == ["a.example:1", "10.0.0.1:1"]


async def test_the_machine_s_own_resolver_is_used() -> None:
    places = await listed_addresses(parse_endpoints("localhost:7"))
    assert {str(each) for each in places} <= {"127.0.0.1:7", "[::1]:7"}
    assert places


@pytest.mark.parametrize(
    ("text", "named"), [("a.example:1", True), ("10.0.0.1:1", False), ("[::1]:1", False), ("unix:/x", False)]
)
def test_only_host_names_count_as_names(text: str, named: bool) -> None:
    assert has_name(parse_endpoint(text)) == named
