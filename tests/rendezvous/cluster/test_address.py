"""Names and addresses of replicas."""

from __future__ import annotations

import socket

import pytest

from rallypoint.rendezvous.cluster.keys import advertised_address, replica_name, split_shards
from rallypoint.rpc.endpoint import SettingError


@pytest.mark.parametrize(
    ("advertise", "listening", "address"),
    [
        ("", "127.0.0.1:29400", "127.0.0.1:29400"),
        ("", "10.1.2.3:29400", "10.1.2.3:29400"),
        ("", "[fd00::1]:29400", "[fd00::1]:29400"),
        ("", "0.0.0.0:29400", f"{socket.gethostname()}:29400"),
        ("", "[::]:29400", f"{socket.gethostname()}:29400"),
        ("rendezvous-0.rally:1234", "0.0.0.0:29400", "rendezvous-0.rally:1234"),
        ("rendezvous-0.rally:1234", "unix:/run/rally.sock", "rendezvous-0.rally:1234"),
    ],
)
def test_the_advertised_address_is_one_that_others_can_use(
    advertise: str, listening: str, address: str
) -> None:
    """The given address, else the listening one, else this machine's name."""
    assert advertised_address(advertise, listening) == address


@pytest.mark.parametrize(
    ("advertise", "listening", "told"),
    [
        (
            "0.0.0.0:29400",
            "0.0.0.0:29400",
            "--advertise 0.0.0.0:29400 is not an address that other hosts can connect to",
        ),
        ("[::]:29400", "0.0.0.0:29400", "is not an address that other hosts can connect to"),
        ("unix:/run/rally.sock", "0.0.0.0:29400", "is not an address that other hosts can connect to"),
        ("somewhere", "0.0.0.0:29400", "has no port"),
        ("", "unix:/run/rally.sock", "give --advertise HOST:PORT, or listen on TCP"),
    ],
)
def test_an_unreachable_address_is_refused(advertise: str, listening: str, told: str) -> None:
    """In one line, at the start and not when a client is redirected there."""
    with pytest.raises(SettingError, match=told.replace("[", r"\[")) as refused:
        advertised_address(advertise, listening)
    assert "\n" not in str(refused.value)


def test_a_replica_is_named_after_its_host_and_port() -> None:
    """Two on one host have two names, and a restart changes none."""
    assert replica_name("", "10.0.0.1:29401").endswith("-29401")
    assert replica_name("rendezvous-0", "10.0.0.1:29401") == "rendezvous-0"


@pytest.mark.parametrize("name", ["a/b", "-a", "a b", "größe", "a" * 129, "a\n"])
def test_an_invalid_name_is_refused(name: str) -> None:
    """It becomes a part of a key, and a word in logs and tables."""
    with pytest.raises(SettingError, match="is not valid"):
        replica_name(name, "10.0.0.1:29401")


@pytest.mark.parametrize(
    ("url", "rest", "shards"),
    [
        ("etcd://a:1/p", "etcd://a:1/p", None),
        ("etcd://a:1/p?shards=8", "etcd://a:1/p", 8),
        ("etcd://a:1/p?ca=f&shards=8", "etcd://a:1/p?ca=f", 8),
        ("etcd://a:1/p?shards=8&ca=f&user=u", "etcd://a:1/p?ca=f&user=u", 8),
        ("etcd://a:1/p?ca=f&shards=8&user=u", "etcd://a:1/p?ca=f&user=u", 8),
        ("etcd://a:1/p?ca=myshards=8", "etcd://a:1/p?ca=myshards=8", None),
    ],
)
def test_the_number_of_shards_is_taken_out_of_the_url(url: str, rest: str, shards: int | None) -> None:
    """The rest is the URL of an etcd cluster, which has no shards."""
    assert split_shards(url) == (rest, shards)


@pytest.mark.parametrize("value", ["", "0", "4097", "-1", "x", "8&shards=9"])
def test_an_impossible_number_of_shards_is_refused(value: str) -> None:
    """In one line, with the valid range."""
    with pytest.raises(SettingError, match="expected one number from 1 to 4096"):
        split_shards(f"etcd://a:1/p?shards={value}")
