"""TLS and client certificates, with real files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etcd.patient import put
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import Put, Txn
from rallypoint.rpc.tls import TLSFileError
from serving.conftest import Certificates, make_certificates
from support.etcd_server import EtcdCluster, EtcdTLS, etcd_cluster

QUICK = "attempt-timeout=5&request-timeout=10"


@pytest.fixture(scope="module")
def strict(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A member that requires TLS and a client certificate of the same CA."""
    tls = EtcdTLS(certificates.server, certificates.server_key, certificates.ca)
    with etcd_cluster(tmp_path_factory.mktemp("strict"), tls=tls) as cluster:
        yield cluster


async def test_a_client_with_a_certificate_is_accepted(
    connect: Callable[..., EtcdClient], strict: EtcdCluster, certificates: Certificates
) -> None:
    """By address and by name; everything works over TLS: transactions, leases, watches."""
    files = f"?ca={certificates.ca}&cert={certificates.client}&key={certificates.client_key}&{QUICK}"
    client = connect(strict.url + files)
    assert (await client.transact(Txn([], [Put(b"/tls/a", b"1")]))).succeeded
    session = await Session.open(client, 30)
    assert session.held()
    (change,) = await anext(client.watch(b"/tls/a", b"", 1))
    assert change.pair.value == b"1"
    await session.close()
    by_name = strict.url.replace("127.0.0.1", "localhost").replace("etcd://", "etcds://")
    assert (await connect(by_name + files).get(b"/tls/a")).pairs


@pytest.mark.slow
async def test_a_client_without_a_valid_certificate_is_refused(
    connect: Callable[..., EtcdClient], strict: EtcdCluster, certificates: Certificates, tmp_path: Path
) -> None:
    """So are a certificate of another CA, and plaintext; a foreign server gets no request. The error has a remedy."""
    others = make_certificates(tmp_path, "second")
    for query, advice in (
        (f"?ca={certificates.ca}&", "cert of the etcd URL"),
        (f"?ca={certificates.ca}&cert={others.client}&key={others.client_key}&", "cert of the etcd URL"),
        (f"?ca={others.ca}&cert={certificates.client}&key={certificates.client_key}&", "ca of the etcd URL"),
        ("?", "then give etcds://"),
    ):
        await refused(connect, f"{strict.url}{query}attempt-timeout=5&request-timeout=3", advice)


async def refused(connect: Callable[..., EtcdClient], url: str, advice: str) -> None:
    """Check that no call succeeds there, and that the error has this advice."""
    client = connect(url)
    with pytest.raises(EtcdUnavailable) as unavailable:
        await client.get(b"a")
    assert advice in str(unavailable.value)


async def test_tls_to_a_plaintext_server_is_reported(
    connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster
) -> None:
    """An operator with one letter too many in the scheme need not check certificates."""
    url = shared_etcd.url.replace("etcd://", "etcds://") + "?attempt-timeout=5&request-timeout=3"
    await refused(connect, url, "then give etcd://")


def test_a_missing_or_wrong_file_is_named_at_once(certificates: Certificates) -> None:
    """The error comes before anything connects."""
    with pytest.raises(TLSFileError, match="/nowhere"):
        EtcdClient(parse_address("etcds://a?ca=/nowhere", {}))
    with pytest.raises(
        TLSFileError, match=r"^key of the etcd URL .* is not the private key of cert of the etcd URL "
    ):
        EtcdClient(parse_address(f"etcds://a?cert={certificates.client}&key={certificates.server_key}", {}))


async def test_files_that_were_replaced_are_read_again(
    connect: Callable[..., EtcdClient], strict: EtcdCluster, certificates: Certificates, tmp_path: Path
) -> None:
    """A client that can't connect with the old ones does so; half a file changes nothing."""
    others = make_certificates(tmp_path / "others", "second")
    shown, key = tmp_path / "client.pem", tmp_path / "client.key"
    shutil.copy(others.client, shown)
    shutil.copy(others.client_key, key)
    client = connect(
        f"{strict.url}?ca={certificates.ca}&cert={shown}&key={key}&attempt-timeout=2&request-timeout=1"
    )
    with pytest.raises(EtcdUnavailable):
        await client.get(b"a")
    shutil.copy(certificates.client, shown)
    with pytest.raises(EtcdUnavailable):
        await client.get(b"a")
    shutil.copy(certificates.client_key, key)
    await put(client, b"/tls/rotated")
    assert (await client.get(b"/tls/rotated")).pairs
