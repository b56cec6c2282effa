"""The URL of a cluster: its parts, and the errors of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.etcd.endpoint import PASSWORD_VARIABLE, parse_address
from rallypoint.rpc.endpoint import ClientTLS, Endpoint, SettingError

PASSWORD = "s3cret/@:x"  # noqa: S105
QUOTED = "s3cret%2F%40%3Ax"


def test_the_shortest_url_names_a_host() -> None:
    """Port, prefix and all other parts have their defaults."""
    address = parse_address("etcd://a", {})
    assert address.endpoints == (Endpoint("a", 2379),)
    assert (address.prefix, address.tls, address.user, address.password) == ("/rallypoint", None, "", "")


def test_a_url_can_name_everything(tmp_path: Path) -> None:
    """It has several members, IPv6 among them, prefix, user, TLS files and times."""
    address = parse_address(
        f"etcd://me:{QUOTED}@a:1,[::1]:2,[fe80::2],10.0.0.1/some/where/"
        "?ca=/c.pem&cert=/d.pem&key=/e.pem&request-timeout=7&attempt-timeout=0.5",
        {PASSWORD_VARIABLE: "another"},
    )
    assert [str(each) for each in address.endpoints] == ["a:1", "[::1]:2", "[fe80::2]:2379", "10.0.0.1:2379"]
    assert (address.prefix, address.user, address.password) == ("/some/where", "me", PASSWORD)
    assert address.tls == ClientTLS(Path("/c.pem"), Path("/d.pem"), Path("/e.pem"))
    assert (address.request_timeout, address.attempt_timeout) == (7.0, 0.5)


def test_etcds_is_tls_with_the_public_roots() -> None:
    """A file replaces them."""
    assert parse_address("etcds://a", {}).tls == ClientTLS()
    assert parse_address("etcds://a?ca=/c.pem", {}).tls == ClientTLS(Path("/c.pem"))


def test_a_password_need_not_stand_in_the_url(tmp_path: Path) -> None:
    """It comes from the environment or from a file, without the newline that editors leave."""
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    assert parse_address("etcd://me@a", {PASSWORD_VARIABLE: PASSWORD}).password == PASSWORD
    assert parse_address("etcd://a?user=me", {PASSWORD_VARIABLE: PASSWORD}).password == PASSWORD
    from_file = parse_address(f"etcd://me@a?password-file={file}", {PASSWORD_VARIABLE: "another"})
    assert from_file.password == PASSWORD
    assert parse_address("etcd://a", {PASSWORD_VARIABLE: "for another cluster"}).password == ""


def test_a_password_is_never_shown() -> None:
    """Its text and its `repr` do not contain it."""
    address = parse_address(f"etcd://me:{QUOTED}@a,b:3/x", {})
    assert str(address) == "etcd://me@a:2379,b:3/x"
    assert PASSWORD not in repr(address)
    assert QUOTED not in repr(address)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("a:2379", "is not the URL of an etcd cluster"),
        ("http://a:2379", "is not the URL of an etcd cluster"),
        ("etcd://", "has an empty host"),
        ("etcd://a,,b", "has an empty host"),
        ("etcd:///x", "has an empty host"),
        ("etcd://a:", "has port ''"),
        ("etcd://a:99999", "has port '99999'"),
        ("etcd://::1", "put an IPv6 address in brackets"),
        ("etcd://[::1", "ambiguous|no IPv6"),
        ("etcd://[x]:1", "no IPv6 address between its brackets"),
        ("etcd://a_b!", "no valid host name"),
        ("etcd://a,b:2379,a:2379", "names a:2379 twice"),
        ("etcd://a/x y", "space or control character"),
        ("etcd://a/x%20y", "expected a path"),
        ("etcd://a//x", "expected a path"),
        ("etcd://a/" + "x" * 300, "at most 256 bytes"),
        ("etcd://a#x", "write it as %23"),
        ("etcd://a?nonsense=1", "expected one of ca, cert, key, user"),
        ("etcd://a?ca", "not name=value"),
        ("etcd://a?ca=", "without a value"),
        ("etcd://a?ca=/x&ca=/y", "twice"),
        ("etcd://a?cert=/x", "'cert' without 'key'"),
        ("etcd://a?key=/x", "'key' without 'cert'"),
        ("etcd://me@a", "no password: set RALLYPOINT_ETCD_PASSWORD"),
        ("etcd://me:@a", "empty password"),
        (f"etcd://:{QUOTED}@a", "a password and no user"),
        (f"etcd://me:{QUOTED}@a?user=you", "a user before the @ and one in the query"),
        (f"etcd://me:{QUOTED}@a?password-file=/x", "give one of them"),
        ("etcd://me@a?password-file=/nowhere/at/all", "password-file /nowhere/at/all: No such file"),
        ("etcd://a?request-timeout=soon", "expected seconds"),
        ("etcd://a?attempt-timeout=nan", "expected seconds"),
        ("etcd://a?attempt-timeout=0", "expected seconds"),
        (f"etcd://me:{QUOTED}@a?nonsense=1", "expected one of"),
        (f"http://me:{QUOTED}@a", "is not the URL"),
        (f"me:{QUOTED}@a", "is not the URL"),
        (f"etcd:/me:{QUOTED}@a", "is not the URL"),
        (f"etcd://me:{PASSWORD}@a", "in a user, password or path write / as %2F"),
        ("etcd://me:s3cret\ns3cret@a", "space or control character"),
        ("etcd://me@a?password=s3cret", "has the parameter 'password', expected one of"),
        ("etcd://me:s3cret?ca=s3cret@a", "in a user, password or path write / as %2F"),
    ],
)
def test_an_error_in_a_url_is_reported_in_one_line(url: str, complaint: str) -> None:
    """The line never contains the password, however wrong the URL is."""
    with pytest.raises(SettingError, match=complaint) as raised:
        parse_address(url, {})
    said = str(raised.value)
    assert "\n" not in said
    assert "s3cret" not in said
