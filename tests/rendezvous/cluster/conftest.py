"""An etcd for all tests of replicas; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress, parse_address
from support.etcd_server import PATIENT, EtcdCluster, etcd_cluster

_prefixes = count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member that runs as long as the tests do."""
    folder: Path = tmp_path_factory.mktemp("replicas")
    with etcd_cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def address(etcd: EtcdCluster) -> EtcdAddress:
    """A prefix in it that nobody used before."""
    return parse_address(f"{etcd.url}/test{next(_prefixes)}?{PATIENT}")


@pytest.fixture
async def client(address: EtcdAddress) -> AsyncIterator[EtcdClient]:
    """A client of it."""
    async with EtcdClient(address) as opened:
        yield opened
