"""Services inside an agent's process."""

from __future__ import annotations

from rallypoint.launcher.services import embedded_rendezvous, embedded_timer
from rallypoint.rpc.runtime_folder import run_socket


async def test_embedded_services_are_at_sockets_of_their_own() -> None:
    """Several agents on one host don't collide, and each is found by its run."""
    async with embedded_rendezvous("a") as one, embedded_rendezvous("b") as two, embedded_timer("a") as three:
        assert run_socket("rendezvous", "a") == one
        assert run_socket("rendezvous", "b") == two
        assert run_socket("timer", "a") == three
        async with embedded_rendezvous("a") as four:
            assert four not in (one, two, three)
    assert run_socket("rendezvous", "a") is None
