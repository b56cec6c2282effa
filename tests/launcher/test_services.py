"""Services inside an agent's process."""

from __future__ import annotations

from rallypoint.launcher.services import embedded_rendezvous, embedded_timer


async def test_embedded_services_stand_on_loopback_at_ports_of_their_own() -> None:
    """Several agents on one host don't collide."""
    async with embedded_rendezvous() as one, embedded_rendezvous() as two, embedded_timer() as three:
        assert len({one, two, three}) == 3
        assert all(address.startswith("127.0.0.1:") for address in (one, two, three))
