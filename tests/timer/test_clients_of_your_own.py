"""Another client may replace the agent, and the ready-made one has one timer per scope."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rallypoint.timer import Client, TimerClient, configure, expires
from rallypoint.timer.worker.expires import progress
from rallypoint.timer.worker.process import SOCKET_VARIABLE, process
from support.timer_agent import Agent


class Recording:
    """A client that records its calls and sends nothing."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self.failing = False

    def acquire(self, scope: str, after: float) -> None:
        if self.failing:
            raise OSError("no client")
        self.events.append((scope, after))

    def release(self, scope: str) -> None:
        self.events.append((scope, None))


@pytest.fixture(autouse=True)
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the process, so that each test starts with nothing chosen."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    process.table = process.connection = process.client = None
    yield
    process.table = process.connection = process.client = None


def test_a_block_may_have_a_client_of_its_own() -> None:
    """No agent is needed then; decorators accept a client as well."""
    client: TimerClient = Recording()

    @expires(5, "call", client)
    def call() -> None: ...

    with expires(60, "block", client):
        call()
        call()
    assert isinstance(client, Recording)
    assert client.events == [
        ("block", 60.0), ("call", 5.0), ("call", None), ("call", 5.0), ("call", None), ("block", None)
    ]  # fmt: skip


def test_a_client_may_be_chosen_for_all_blocks() -> None:
    """It records no steps, so progress does nothing."""
    client = Recording()
    configure(client=client)
    once = expires(60, "s")
    with once:
        progress(1)
        with pytest.raises(RuntimeError, match="guards a block already"), once:
            pass
    with once:
        pass
    assert client.events == [("s", 60.0), ("s", None)] * 2


def test_an_error_of_a_client_is_raised() -> None:
    """The block is not entered, and the guard can be used again."""
    client = Recording()
    once = expires(60, "s", client)
    client.failing = True
    with pytest.raises(OSError, match="no client"), once:
        raise AssertionError
    client.failing = False
    with once:
        pass
    assert client.events == [("s", 60.0), ("s", None)]


def test_features_of_the_agent_are_refused_with_a_client() -> None:
    """It is refused, so that no user relies on it."""
    with pytest.raises(ValueError, match="takes seconds"):
        expires("auto", client=Recording())
    with pytest.raises(ValueError, match="no signal"):
        expires(60, client=Recording(), signal=10)
    configure(client=Recording())
    for once in (expires("auto"), expires(60, signal=10)):
        with pytest.raises(RuntimeError, match="takes seconds"), once:
            pass


def test_a_client_and_a_socket_are_one_too_many() -> None:
    """They are refused, because one of them would be ignored."""
    with pytest.raises(ValueError, match="socket and client"):
        configure("/nowhere", client=Recording())


def test_the_ready_made_client_has_one_timer_per_scope(agent: Agent) -> None:
    """Acquired again, it has its new deadline; released, it ends; an unknown scope is no error."""
    client = Client(agent.path)
    client.acquire("s", 60)
    connection = agent.welcome()
    client.acquire("t", 5)
    client.acquire("s", 70)
    held = {slot.scope: slot.after for slot in connection.table.slots()}
    assert held == {b"s": 70_000_000_000, b"t": 5_000_000_000}
    client.release("s")
    client.release("s")
    client.release("unknown")
    assert connection.scopes() == ["t"]
    client.close()


def test_the_ready_made_client_guards_blocks(agent: Agent) -> None:
    """It can be the client of all blocks, and does not call itself."""
    client = Client(agent.path)
    configure(client=client)
    with expires(60, "s"):
        connection = agent.welcome()
        assert connection.scopes() == ["s"]
    assert connection.scopes() == []
    client.close()


@pytest.mark.parametrize("after", [0, -1, float("nan")])
def test_the_ready_made_client_refuses_an_invalid_duration(agent: Agent, after: float) -> None:
    """It refuses the same as `expires`."""
    with pytest.raises(ValueError, match="after is"):
        Client(agent.path).acquire("s", after)
    with pytest.raises(TypeError, match="does not learn"):
        Client(agent.path).acquire("s", "auto")  # type: ignore[arg-type]
