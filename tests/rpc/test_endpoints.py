"""A list of endpoints names each address once, and an error in it quotes the part that has it."""

from __future__ import annotations

import pytest

from rallypoint.rpc.endpoint import EndpointError, parse_endpoints


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a:29400", "a:29400"),
        ("a:29400,b:29400,c:29401", "a:29400,b:29400,c:29401"),
        ("c:1,a:1,b:1", "c:1,a:1,b:1"),
        ("a:1, b:1", "a:1,b:1"),
        ("a:1,b:1,a:1", "a:1,b:1"),
        ("[::1]:1,[0:0::1]:1,127.0.0.1:1", "[::1]:1,127.0.0.1:1"),
        ("unix:/run/a.sock,unix:///run/b.sock", "unix:/run/a.sock,unix:/run/b.sock"),
    ],
)
def test_addresses_are_read_in_their_order_each_once(text: str, read: str) -> None:
    assert str(parse_endpoints(text)) == read


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "endpoint '' has no port"),
        ("a", "endpoint 'a' has no port, expected host:port"),
        ("a:1,", "endpoint 2 of 'a:1,' is empty"),
        (",a:1", "endpoint 1 of ',a:1' is empty"),
        ("a:1,,b:1", "endpoint 2 of 'a:1,,b:1' is empty"),
        ("a:1,b,c:1", "endpoint 2 of 3: endpoint 'b' has no port, expected host:port"),
        ("a:1,b:0", "endpoint 2 of 2: endpoint 'b:0' has port '0', expected a number from 1 to 65535"),
        ("a:1;b:1", "endpoint 'a:1;b:1' is ambiguous"),
        ("a:1,etcd://b:1", "endpoint 2 of 2: endpoint 'etcd://b:1' has a scheme"),
    ],
)
def test_a_mistake_is_reported_with_its_part(text: str, complaint: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoints(text)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_a_list_is_of_this_machine_alone_if_all_of_it_is() -> None:
    assert parse_endpoints("localhost:1,[::1]:2,unix:/x").loopback
    assert not parse_endpoints("localhost:1,10.0.0.1:2").loopback


def test_no_part_of_a_password_is_shown() -> None:
    """That holds even with a comma in it; sockets may have an @ in their names."""
    with pytest.raises(EndpointError, match=r"endpoint 'me:\*\*\*@a:1' has an @"):
        parse_endpoints("me:hid,den@a:1")
    assert len(parse_endpoints("unix:/run/a@1,b:2").endpoints) == 2
