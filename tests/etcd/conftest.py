"""Real etcd members, and clients of them that are closed with their test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from serving.conftest import Certificates, make_certificates
from support.etcd_server import ETCD, PATIENT, EtcdCluster, etcd_cluster


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for all tests that leave it intact."""
    if ETCD is None:
        pytest.skip("needs the etcd command (apt install etcd-server)")
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members, for the test alone."""
    with etcd_cluster(tmp_path / "trio", 3) as cluster:
        yield cluster


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., EtcdClient]]:
    """Create clients of a URL; they are closed with the test."""
    clients: list[EtcdClient] = []

    def make(url: str, **settings: Any) -> EtcdClient:
        clients.append(EtcdClient(parse_address(url, {}), **settings))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster) -> EtcdClient:
    """A client of the shared member that waits for each reply as long as a loaded machine needs."""
    return connect(f"{shared_etcd.url}?{PATIENT}")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of one CA."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    return make_certificates(tmp_path_factory.mktemp("tls"), "first")
