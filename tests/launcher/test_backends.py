"""torchrun's rendezvous flags lead all hosts to one address, for each backend."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.launcher.backends import RequestedRendezvous, is_etcd_url, resolve_rendezvous
from rallypoint.launcher.plan import Embedded, ExternalService, Hosted, Replicated
from rallypoint.rpc.endpoint import Endpoint, SettingError
from support.processes import modules_after

FIXED = {"nodes": (2, 2)}


def replicated(prefix: str) -> Replicated:
    """Return a rendezvous served by agents, over the etcd on host a."""
    return Replicated(EtcdAddress((Endpoint("a", 2379),), prefix))


@pytest.mark.parametrize(
    ("wish", "place"),
    [
        ({}, Embedded()),
        ({"standalone": True}, Embedded()),
        ({"standalone": True, "backend": "c10d", "endpoint": "a:1"}, Embedded()),
        ({"endpoint": "a:1", "run_id": "x"}, ExternalService("a:1")),
        ({"endpoint": "a:1", "run_id": "x", "nodes": (1, 4)}, ExternalService("a:1")),
        ({"endpoint": "a:1", "run_id": "x", "backend": "rallypoint", **FIXED}, ExternalService("a:1")),
        # An endpoint without a backend is our own backend, with any other flags.
        ({"endpoint": "a:1", "run_id": "x", "node_rank": 1, **FIXED}, ExternalService("a:1")),
        # torchrun's default, if a flag implies it.
        ({"node_rank": 0, **FIXED}, Hosted("127.0.0.1:29501", here=True)),
        ({"node_rank": 1, **FIXED}, Hosted("127.0.0.1:29501", here=False)),
        ({"master_address": "head", **FIXED}, Hosted("head:29501", here=True)),
        ({"master_port": 7000, **FIXED}, Hosted("127.0.0.1:7001", here=True)),
        ({"backend": "static", **FIXED}, Hosted("127.0.0.1:29501", here=True)),
        ({"master_address": "fd00::1", "master_port": 7000, **FIXED}, Hosted("[fd00::1]:7001", here=True)),
        ({"backend": "static", "endpoint": "head:7000", **FIXED}, Hosted("head:7001", here=True)),
        (
            {"backend": "static", "endpoint": "head:7000", "master_port": 9000, **FIXED},
            Hosted("head:7000", here=True),
        ),
        (
            {"conf": {"is_host": "1"}, "node_rank": 0, **FIXED},
            Hosted("127.0.0.1:29501", here=True, away=True),
        ),
        ({"backend": "static"}, Embedded()),
        ({"master_port": 7000}, Embedded()),
        ({"master_address": "head"}, Embedded()),
        ({"backend": "c10d", **FIXED}, Hosted("localhost:29400")),
        ({"backend": "c10d", "endpoint": "head", **FIXED}, Hosted("head:29400")),
        ({"backend": "c10d", "endpoint": "[fd00::1]", "nodes": (1, 2)}, Hosted("[fd00::1]:29400")),
        ({"backend": "c10d", "endpoint": "[fd00::1]:5", "nodes": (1, 2)}, Hosted("[fd00::1]:5")),
        (
            {"backend": "c10d", "conf": {"is_host": "True"}, **FIXED},
            Hosted("localhost:29400", here=True, away=True),
        ),
        ({"backend": "c10d", "conf": {"is_host": "0"}, **FIXED}, Hosted("localhost:29400", here=False)),
        ({"backend": "c10d", "endpoint": "localhost:0"}, Embedded()),
        # An etcd, in each notation; the last part of the prefix is the run.
        ({"endpoint": "etcd://a/x"}, replicated("/torchelastic/p2p/x")),
        ({"endpoint": "etcd://a", "run_id": "x", "backend": "etcd"}, replicated("/torchelastic/p2p/x")),
        ({"backend": "etcd", "endpoint": "a", "run_id": "x", **FIXED}, replicated("/torchelastic/p2p/x")),
        ({"backend": "etcd-v2", "endpoint": "a", "run_id": "x"}, replicated("/torch/elastic/rendezvous/x")),
        ({"endpoint": "etcd://a/x", "standalone": True}, Embedded()),
    ],
)
def test_the_address_of_the_rendezvous(wish: dict[str, Any], place: object) -> None:
    """The same flags on all hosts lead to the same address."""
    assert resolve_rendezvous(RequestedRendezvous(**wish)).service == place


@pytest.mark.parametrize(
    ("wish", "master"),
    [
        ({}, (None, None)),
        ({"backend": "c10d"}, (None, None)),
        ({"node_rank": 1, **FIXED}, ("127.0.0.1", 29500)),
        ({"master_address": "head", "master_port": 7000, **FIXED}, ("head", 7000)),
        ({"master_port": 7000}, ("127.0.0.1", 7000)),
        ({"backend": "static", "endpoint": "head:7000", **FIXED}, ("head", 7000)),
        ({"backend": "static", "endpoint": "head:7000", "master_port": 9000, **FIXED}, ("127.0.0.1", 9000)),
    ],
)
def test_the_address_of_the_workers(wish: dict[str, Any], master: tuple[str | None, int | None]) -> None:
    """It is the given address with static; otherwise each round has its own."""
    found = resolve_rendezvous(RequestedRendezvous(**wish))
    assert (found.master_address, found.master_port) == master


@pytest.mark.parametrize(
    ("wish", "nodes"),
    [
        ({"endpoint": "a:1", "run_id": "x"}, None),
        ({"backend": "etcd", "run_id": "x", **FIXED}, None),
        ({"endpoint": "etcd://a/x?min_workers=2&max_workers=3"}, (2, 3)),
        ({"endpoint": "etcd://a/x?min_workers=2", "nodes_given": True, **FIXED}, (2, 2)),
    ],
)
def test_a_url_may_set_the_number_of_nodes(wish: dict[str, Any], nodes: tuple[int, int] | None) -> None:
    """It applies if the flag is missing or has the same value."""
    assert resolve_rendezvous(RequestedRendezvous(**wish)).nodes == nodes


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ({"run_id": "job"}, ("job", "")),
        ({"run_id": "job", "standalone": True}, ("job", "")),
        ({"backend": "c10d"}, ("none", "")),
        ({"backend": "static", "node_rank": 1, **FIXED}, ("none", "rank1")),
        ({"run_id": "job", "node_rank": 1, **FIXED}, ("job", "rank1")),
    ],
)
def test_names_of_run_and_node(wish: dict[str, Any], names: tuple[str, str]) -> None:
    """A given rank is the node's name, so that its ranks stay the same in every round."""
    found = resolve_rendezvous(RequestedRendezvous(**wish))
    assert (found.run_id, found.node_id) == names


def test_jobs_of_one_host_have_names_of_their_own() -> None:
    """A given name is used instead."""
    assert len({resolve_rendezvous(RequestedRendezvous()).run_id for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"nodes": (1, 4)}, "Give --rdzv-endpoint HOST:PORT"),
        (FIXED, "Give --rdzv-endpoint HOST:PORT"),
        ({"node_rank": 0, "nodes": (1, 4)}, "Give --rdzv-endpoint HOST:PORT"),
        ({"endpoint": "a:1"}, "Give --rdzv-id NAME"),
        ({"standalone": True, **FIXED}, "--nnodes: --standalone runs on this host alone"),
        ({"backend": "static", "nodes": (1, 4)}, "--nnodes: 1:4 is elastic, and the static backend is not"),
        ({"node_rank": 2, **FIXED}, "--node-rank: 2 is not one of 2 nodes'; expected a number from 0 to 1"),
        ({"master_port": 65535, **FIXED}, "--master-port: 65535 leaves no port"),
        ({"backend": "static", "endpoint": "head", **FIXED}, "--rdzv-endpoint: 'head' has no port"),
        ({"backend": "static", "conf": {"rank_policy": "topology"}, **FIXED}, "--rdzv-conf: rank_policy"),
        ({"backend": "c10d", "endpoint": "head:0", **FIXED}, "--rdzv-endpoint: 'head:0' has port 0"),
        ({"backend": "c10d", "endpoint": "a:1,b:1"}, "--rdzv-endpoint: 'a:1,b:1' names several addresses"),
        ({"backend": "static", "endpoint": "a:1,b:1", **FIXED}, "'a:1,b:1' names several addresses"),
        (
            {"backend": "c10d", "endpoint": "a:1,b:1"},
            "only --rdzv-backend rallypoint, etcd and etcd-v2 accept",
        ),
        ({"backend": "c10d", "endpoint": "me:hidden@a:1"}, "--rdzv-endpoint: 'me:***@a:1' names a user"),
        ({"backend": "c10d", "endpoint": "head:x"}, "--rdzv-endpoint: 'head:x' has port 'x'"),
        ({"backend": "c10d", "endpoint": "head:65536"}, "--rdzv-endpoint: 'head:65536' has port '65536'"),
        ({"backend": "etcd"}, "Give --rdzv-id NAME"),
        ({"backend": "etcd-v2", "endpoint": "a:x", "run_id": "x"}, "--rdzv-endpoint: 'a:x'"),
        ({"backend": "c10d", "endpoint": "etcd://a/x"}, "--rdzv-backend c10d contradicts --rdzv-endpoint"),
        ({"backend": "rallypoint", "endpoint": "etcd://a/x"}, "--rdzv-backend rallypoint contradicts"),
        ({"endpoint": "etcd://a/x?min_workers=2", "nodes": (1, 2), "nodes_given": True}, "--nnodes 1:2"),
        ({"backend": "zeus"}, "--rdzv-backend: 'zeus' is not a backend"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(wish: dict[str, Any], told: str) -> None:
    """The line names the flag that is wrong or missing."""
    with pytest.raises(SettingError) as caught:
        resolve_rendezvous(RequestedRendezvous(**wish))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("wish", "flags"),
    [
        ({"standalone": True, "backend": "c10d", "endpoint": "a:1"}, ["--rdzv-backend", "--rdzv-endpoint"]),
        ({"backend": "c10d", "node_rank": 1, "master_port": 1}, ["--node-rank", "--master-port"]),
        ({"endpoint": "a:1", "run_id": "x", "node_rank": 0}, []),
        ({"node_rank": 0, "master_address": "a"}, ["--master-addr"]),
        ({"backend": "static", "node_rank": 1, "master_address": "a", **FIXED}, []),
        ({"endpoint": "etcd://a/x", "node_rank": 1}, ["--node-rank"]),
    ],
)
def test_flags_of_another_backend_are_reported(wish: dict[str, Any], flags: list[str]) -> None:
    """torchrun warns too; rank 0 is the default and not reported."""
    assert [
        notice.partition(" ")[0] for notice in resolve_rendezvous(RequestedRendezvous(**wish)).notices
    ] == flags


@pytest.mark.parametrize(
    ("endpoint", "meant"),
    [("etcd://a/x", True), (" etcds://", True), ("etcd:2379", False), ("http://a", False), ("", False)],
)
def test_an_etcd_url_is_recognized(endpoint: str, meant: bool) -> None:
    """It may be malformed: then its error is reported."""
    assert is_etcd_url(endpoint) is meant


def test_only_a_job_with_etcd_loads_the_etcd_modules() -> None:
    """Every module that `rallypoint run` loads delays the start of every job."""
    loaded = modules_after("import rallypoint.cli.run, rallypoint.launcher.launch")
    assert not [name for name in loaded if "etcd" in name or name.startswith("rallypoint.launcher.rep")]


def test_a_plan_with_etcd_goes_to_another_process() -> None:
    """The plan of a launch from Python also does, to its agent."""
    place = resolve_rendezvous(
        RequestedRendezvous(endpoint="etcds://me@a,b:1/x", environment={"RALLYPOINT_ETCD_PASSWORD": "p"})
    ).service
    assert pickle.loads(pickle.dumps(place)) == place  # noqa: S301 (ours)
