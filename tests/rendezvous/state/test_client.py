"""Calls go on over a restart of the service, every set takes effect exactly once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.core.commands import LeaseLost
from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.state.core import FencedState
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from rendezvous.state.state_fakes import RUN, TestJournal, channel_to, open_states, serving


def after_a_kill(journal: TestJournal) -> TestJournal:
    """The journal as a restarted service finds it; commits that the dead one still held are lost."""
    restarted = TestJournal()
    restarted.rows = dict(journal.rows)
    journal.fails_with = OSError("dead")
    journal.release()
    return restarted


@pytest.mark.parametrize("durable", [True, False], ids=["killed-after-commit", "killed-before-commit"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "replacing"])
async def test_a_set_over_a_restart_takes_effect_once(tmp_path: Path, first: bool, durable: bool) -> None:
    """The service dies with the set unanswered, made durable or not: it takes effect once and gets its own token."""
    journal, path = TestJournal(), f"{tmp_path}/state.sock"
    async with channel_to(path) as channel:
        client = FencedStateClient(channel, RUN)
        async with serving(open_states(journal), path):
            token = None
            if not first:
                before = await client.set(b"x")
                assert before.current is not None
                token = before.current.token
            (journal.hold_after if durable else journal.hold)()
            setting = asyncio.ensure_future(client.set(b"new", token))
            await journal.until_held()
        journal = after_a_kill(journal)
        assert not setting.done()
        async with serving(open_states(journal), path):
            outcome = await setting
            assert outcome.has_set
            assert outcome.current is not None
            assert outcome.current.state == b"new"
            assert await client.get() == outcome.current
            assert len(journal.commits) == (0 if durable else 1)
            assert (await client.set(b"newer", outcome.current.token)).has_set


async def test_a_set_that_was_replaced_meanwhile_gets_a_successful_reply(tmp_path: Path) -> None:
    """The reply is as if it had come in time: the state was set for a while, and its token is an old one."""
    journal, path = TestJournal(), f"{tmp_path}/state.sock"
    async with channel_to(path) as channel, channel_to(path) as other_channel:
        slow, quick = FencedStateClient(channel, RUN), FencedStateClient(other_channel, RUN)
        async with serving(open_states(journal), path):
            journal.hold_after()
            setting = asyncio.ensure_future(slow.set(b"slow"))
            await journal.until_held()
        journal = after_a_kill(journal)
        states = open_states(journal)
        current = states.get(RUN)
        assert current is not None
        # The other client replaces it before the first one is connected again.
        before = f"{tmp_path}/before.sock"
        async with serving(states, before), channel_to(before) as earlier:
            assert (await FencedStateClient(earlier, RUN).set(b"quick", current.token)).has_set
        async with serving(open_states(journal), path):
            outcome = await setting
            assert outcome.has_set
            assert outcome.current == FencedState(b"slow", current.token)
            latest = await quick.get()
            assert latest is not None
            assert latest.state == b"quick"
            assert not (await slow.set(b"late", current.token)).has_set


async def test_increments_over_restarts_add_up(tmp_path: Path) -> None:
    """A state used as a counter behind a lock: many increment it, the service is killed again and again at any
    point. Each reply has the true outcome of its set, so the sum is the number of successes."""
    journal, path = TestJournal(), f"{tmp_path}/state.sock"
    workers, each = 6, 15
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(path)) for _ in range(2)]
        clients = [FencedStateClient(channel, RUN) for channel in channels]

        async def increment(client: FencedStateClient) -> list[int]:
            seen: list[int] = []
            current = await client.get()
            while len(seen) < each:
                value = int(current.state) if current is not None else 0
                outcome = await client.set(b"%d" % (value + 1), None if current is None else current.token)
                if outcome.has_set:
                    seen.append(value + 1)
                current = outcome.current
            return seen

        counting: asyncio.Future[list[list[int]]] = asyncio.gather(
            *(increment(clients[number % len(clients)]) for number in range(workers))
        )
        lives = 0
        while not counting.done():
            lives += 1
            async with serving(open_states(journal), path):
                enough: asyncio.Future[Any] = asyncio.ensure_future(journal.until_commits(12))
                await asyncio.wait([counting, enough], return_when=asyncio.FIRST_COMPLETED)
                enough.cancel()
                # Every other process ends before a commit, the others after one that was not confirmed.
                (journal.hold if lives % 2 else journal.hold_after)()
            journal = after_a_kill(journal)
        seen = sorted(value for of_one in await counting for value in of_one)
    assert seen == list(range(1, workers * each + 1))
    assert lives > 3


async def test_an_unreachable_service_is_reported_in_time(tmp_path: Path) -> None:
    async with channel_to(f"{tmp_path}/nobody.sock") as channel:
        with pytest.raises(ServiceError, match=r"gave no answer for 0\.05 s") as refused:
            await FencedStateClient(channel, RUN).set(b"x", timeout=0.05)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "STATE_UNAVAILABLE")


async def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    path = f"{tmp_path}/state.sock"
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        raise LeaseLost(run_id, node_id, lease, None)

    async with (
        serving(open_states(TestJournal(), check_lease=check_lease), path),
        channel_to(path) as channel,
    ):
        client = FencedStateClient(channel, RUN, pace=Pace(sleep=sleep))
        with pytest.raises(ServiceError) as refused:
            await client.set(b"x", writer=Writer("node", 1))
        assert refused.value.reason == "LEASE_LOST"
        with pytest.raises(ServiceError, match="run_id"):
            FencedStateClient(channel, "")
        with pytest.raises(ServiceError, match="at most"):
            await client.set(b"x" * 5_000_000)
    assert not slept
