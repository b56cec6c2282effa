"""The rules of torch for a rendezvous backend hold over a real server and each journal, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.state_servicer import fenced_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.journal.journal import Journal, MemoryJournal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.state.core import SPACE, FencedState, SetOutcome
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rendezvous.locators import locator_of
from rendezvous.state.state_fakes import RUN, channel_to
from rendezvous.store.store_fakes import Rounds

JOURNALS: dict[str, Callable[[Path], Journal]] = {
    "memory": lambda folder: MemoryJournal(),
    "sqlite": lambda folder: SqliteJournal(folder / "journal.sqlite"),
}


@contextlib.asynccontextmanager
async def backend_of(journal: Journal, path: str) -> AsyncIterator[FencedStateClient]:
    """A client of a service over a journal, from its opening to its closing."""
    recovered = await journal.open()
    entries = [entry for entry in recovered.store_entries if entry.round == SPACE]
    states = FencedStateService(journal, Rounds(), clock=time.monotonic, draw=secrets.token_bytes)
    finish(states.restoring(entries))
    serving = asyncio.create_task(states.serve())
    server = Server(
        ServerOptions(host=f"unix:{path}"),
        services=[fenced_registration(locator_of(states))],
        translate=translate,
    )
    await server.start()
    try:
        async with channel_to(path) as channel:
            yield FencedStateClient(channel, RUN)
    finally:
        await server.stop()
        serving.cancel()
        await asyncio.wait([serving])
        await journal.close()


@pytest.fixture(params=JOURNALS)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FencedStateClient]:
    async with backend_of(JOURNALS[request.param](tmp_path), f"{tmp_path}/state.sock") as client:
        yield client


def held(outcome: SetOutcome) -> FencedState:
    assert outcome.current is not None
    return outcome.current


async def test_reading_finds_the_state_that_was_set(backend: FencedStateClient) -> None:
    outcome = await backend.set(b"state")
    assert outcome.has_set
    assert await backend.get() == held(outcome)
    assert held(outcome).state == b"state"
    assert held(outcome).token


async def test_reading_finds_nothing_where_nothing_was_set(backend: FencedStateClient) -> None:
    assert await backend.get() is None


async def test_the_token_of_the_state_replaces_it(backend: FencedStateClient) -> None:
    first = await backend.set(b"first")
    second = await backend.set(b"second", held(first).token)
    assert second.has_set
    assert held(second).state == b"second"
    assert held(second).token != held(first).token


async def test_an_old_token_replaces_nothing(backend: FencedStateClient) -> None:
    """This holds when the state is the same again as then, and when the new state equals the current one."""
    first = await backend.set(b"A")
    second = await backend.set(b"B", held(first).token)
    third = await backend.set(b"A", held(second).token)
    for state in (b"A", b"B", b"C"):
        assert await backend.set(state, held(first).token) == SetOutcome(held(third), has_set=False)


async def test_no_token_replaces_nothing(backend: FencedStateClient) -> None:
    first = await backend.set(b"first")
    assert await backend.set(b"second") == SetOutcome(held(first), has_set=False)


@pytest.mark.parametrize("token", [b"", b"invalid", b"\xff\xfe", b"42", b"x" * 10_000], ids=len)
async def test_an_invalid_token_is_no_error_and_sets_nothing(
    backend: FencedStateClient, token: bytes
) -> None:
    """This holds with and without a state; without one, none is returned."""
    assert await backend.set(b"state", token) == SetOutcome(None, has_set=False)
    assert await backend.get() is None
    first = await backend.set(b"first")
    assert await backend.set(b"second", token) == SetOutcome(held(first), has_set=False)


async def test_any_bytes_are_a_state(backend: FencedStateClient) -> None:
    token = None
    for state in (b"", bytes(range(256)), b"\x00" * 100_000):
        outcome = await backend.set(state, token)
        assert outcome.has_set
        assert await backend.get() == held(outcome)
        assert held(outcome).state == state
        token = held(outcome).token


async def test_a_restart_changes_nothing_that_is_durable(tmp_path: Path) -> None:
    """With SQLite, the state and its token stay valid, and older tokens stay invalid."""
    path = f"{tmp_path}/state.sock"
    async with backend_of(JOURNALS["sqlite"](tmp_path), path) as client:
        first = await client.set(b"first")
        second = await client.set(b"second", held(first).token)
    async with backend_of(JOURNALS["sqlite"](tmp_path), path) as client:
        assert await client.get() == held(second)
        assert not (await client.set(b"third", held(first).token)).has_set
        assert (await client.set(b"third", held(second).token)).has_set


async def test_a_state_that_was_lost_takes_its_token_with_it(tmp_path: Path) -> None:
    """With a journal in memory, the old token matches no state that is set after the restart."""
    path = f"{tmp_path}/state.sock"
    async with backend_of(JOURNALS["memory"](tmp_path), path) as client:
        first = await client.set(b"first")
    async with backend_of(JOURNALS["memory"](tmp_path), path) as client:
        assert await client.set(b"second", held(first).token) == SetOutcome(None, has_set=False)
        again = await client.set(b"first")
        assert held(again).token != held(first).token
        assert not (await client.set(b"second", held(first).token)).has_set
