"""Only valid endpoints are accepted, each refusal has its reason, and loopback is unreachable for other machines."""

from __future__ import annotations

import pytest

from rallypoint.rpc.endpoint import EndpointError, listening_endpoint, parse_endpoint, without_password


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("localhost:29400", "dns:///localhost:29400"),
        ("node-1.cluster_a.example:1", "dns:///node-1.cluster_a.example:1"),
        ("10.0.0.7:65535", "ipv4:10.0.0.7:65535"),
        ("[::1]:29400", "ipv6:[::1]:29400"),
        ("[fe80::1%eth0]:29400", "ipv6:[fe80::1%25eth0]:29400"),
        ("unix:/run/rallypoint.sock", "unix:/run/rallypoint.sock"),
        ("unix:///run/rallypoint.sock", "unix:/run/rallypoint.sock"),
    ],
)
def test_an_endpoint_has_one_unmistakable_target(text: str, target: str) -> None:
    assert parse_endpoint(text).target == target


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no port"),
        ("localhost", "no port"),
        ("[::1]", "no port"),
        ("::1:29400", "put an IPv6 address in brackets, [::1]:29400"),
        ("http://localhost:29400", "scheme"),
        (":29400", "no valid host"),
        ("two words:29400", "no valid host"),
        ("-x:29400", "no valid host"),
        ("x-.y:29400", "no valid host"),
        ("a..b:29400", "no valid host"),
        ("a" * 64 + ":1", "no valid host"),
        ("a.b" * 85 + ":1", "no valid host"),
        ("[localhost]:29400", "no IPv6 address"),
        ("[fe80::1%" + "x" * 300 + "]:29400", "no IPv6 address"),
        ("[fe80::1%a\nb]:29400", "no IPv6 address"),
        ("localhost:", "port ''"),
        ("localhost:0", "port '0'"),
        ("localhost:65536", "port '65536'"),
        ("localhost:+1", "port '+1'"),
        ("localhost:٢٩", "port"),
        ("unix:relative.sock", "absolute path"),
        ("unix:/" + "x" * 107, "too long"),
    ],
)
def test_an_invalid_endpoint_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("etcd://me:hidden@a:1/job", "etcd://me:***@a:1/job"),
        ("etcd://me:hid/den@a:1/job", "etcd://me:***@a:1/job"),
        ("etcd://me:hid@den@a:1", "etcd://me:***@a:1"),
        ("etcd://me:hid\nden@a:1", "etcd://me:***@a:1"),
        ("etcd://m/e:hidden@a:1", "etcd://m/e:***@a:1"),
        ("etcd:/me:hidden@a:1", "etcd:***@a:1"),
        ("me:hidden@a:1,b:2", "me:***@a:1,b:2"),
        ("etcd://me@a/x?y=1&password=hidden&z=2", "etcd://me@a/x?y=1&password=***&z=2"),
        ("etcd://me@a:1,b:2/job", "etcd://me@a:1,b:2/job"),
        ("[::1]:29400", "[::1]:29400"),
    ],
)
def test_a_password_is_not_shown(text: str, shown: str) -> None:
    """An error about the endpoint doesn't show it either."""
    assert without_password(text) == shown
    if shown != text:
        with pytest.raises(EndpointError) as caught:
            parse_endpoint(text)
        assert repr(shown) in str(caught.value)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LocalHost", "unix:/x"]
)
def test_loopback(host: str) -> None:
    assert listening_endpoint(host, 0).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "128.0.0.1", "10.0.0.1", "localhost.example", "fe80::1"])  # noqa: S104
def test_not_loopback(host: str) -> None:
    assert not listening_endpoint(host, 0).loopback


@pytest.mark.parametrize(
    ("host", "port"), [("a b", 1), ("localhost", -1), ("localhost", 65536), ("unix:x", 0)]
)
def test_there_is_no_listening_there(host: str, port: int) -> None:
    with pytest.raises(EndpointError):
        listening_endpoint(host, port)


def test_addresses_are_written_so_that_they_can_be_read_again() -> None:
    assert str(listening_endpoint("::1", 29400)) == "[::1]:29400"
    assert str(listening_endpoint("localhost", 29400)) == "localhost:29400"
    assert str(listening_endpoint("unix:/run/a", 29400)) == "unix:/run/a"
