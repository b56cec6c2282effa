"""An etcd for all tests of replicas; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress, parse_address
from support.etcd_server import PATIENT, EtcdCluster

_prefixes = count()


@pytest.fixture
def address(etcd: EtcdCluster) -> EtcdAddress:
    """A new prefix in it."""
    return parse_address(f"{etcd.url}/test{next(_prefixes)}?{PATIENT}")


@pytest.fixture
async def client(address: EtcdAddress) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(address) as opened:
        yield opened
