"""The peers that count as one client."""

from __future__ import annotations

import pytest

from rallypoint.serving.flow import client_of


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.1.2.3:50051", "10.1.2.3"),
        ("ipv6:[2001:db8:1:2::7]:50051", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:ffff::9%5D:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50051", "fe80::/64"),
        ("ipv6:[::1]:50051", "::/64"),
        ("unix:", "unix"),
        ("unix:/run/rallypoint.sock", "unix"),
        ("unix-abstract:name", "unix-abstract"),
        ("", ""),
    ],
)
def test_a_client_is_its_host(peer: str, client: str) -> None:
    """The port does not matter; of IPv6 its /64 counts; all at a Unix socket are one."""
    assert client_of(peer) == client
