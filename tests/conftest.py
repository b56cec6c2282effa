"""Settings and fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from support.etcd_server import EtcdCluster, etcd_cluster

# No test may fail because the machine is slow.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")

# A suite started in the background ignores Ctrl-C, and so would every process that it tests.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


# Sockets of the tests' services, apart from those of this user's jobs. Short: a socket's path has 107 bytes.
_RUNTIME = tempfile.mkdtemp(prefix="rp-tests-")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME
# The settings file of the user who runs the tests is not read.
os.environ["XDG_CONFIG_HOME"] = _RUNTIME


def pytest_unconfigure() -> None:
    """Remove the folder that this file has made."""
    shutil.rmtree(_RUNTIME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest test first: at the end, the other workers would wait six minutes for it."""
    items.sort(key=lambda item: "test_nemesis.py" not in item.nodeid)


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for all tests that leave it intact: each has its own prefix."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make local time UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
