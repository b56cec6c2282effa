"""torch's etcd flags have the same meaning here: the same etcd, the same protocol and certificates, the same times.

torch's own code runs as installed, up to the point of connecting: beyond, it needs a discontinued client package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

import pytest

from rallypoint.launcher.backends import split_conf
from rallypoint.launcher.etcd_url import EtcdRendezvous, of_flags
from rallypoint.rpc.endpoint import SettingError

pytestmark = pytest.mark.torch

CASES: list[tuple[str, Mapping[str, str]]] = [
    ("", {}),
    ("head", {}),
    ("head:4001", {}),
    (" head:4001 ", {"timeout": "60"}),
    ("10.0.0.7", {"last_call_timeout": "3"}),
    ("[fd00::1]", {}),
    ("[fd00::1]:4001", {"etcd_prefix": "/jobs"}),
    ("head", {"etcd_prefix": "jobs/", "protocol": "http"}),
    ("head", {"protocol": "https"}),
    ("head", {"protocol": "https", "cert": "/c.pem", "key": "/k.pem", "cacert": "/a.pem"}),
    ("head", {"protocol": "https", "cert": "/both.pem"}),
]
V2_CASES: list[tuple[str, Mapping[str, str]]] = [
    ("", {}),
    ("head:4001", {"protocol": "HTTP"}),
    ("head", {"protocol": "https", "ssl_cert": "/c.pem", "ssl_cert_key": "/k.pem", "ca_cert": "/a.pem"}),
    ("head", {"read_timeout": "9"}),
]
REFUSED: list[tuple[str, str, Mapping[str, str]]] = [
    ("etcd", "head:port", {}),
    ("etcd", "head:70000", {}),
    ("etcd", "he ad", {}),
    ("etcd", "head", {"protocol": "ftp"}),
    ("etcd", "head", {"timeout": "soon"}),
    ("etcd-v2", "head", {"protocol": "ftp"}),
]


class Recorder:
    """Replaces a class of torch's: records the arguments of its construction."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, *places: Any, **names: Any) -> Recorder:
        self.given |= {**{str(number): place for number, place in enumerate(places)}, **names}
        return self


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch's objects of flags, as for a command line, down to the arguments of its client."""
    api = pytest.importorskip("torch.distributed.launcher.api")
    # torch has a stub of that client; the folder of our own tests has its name.
    monkeypatch.setitem(sys.modules, "etcd", None)
    # A part of that client; torch names one of its exceptions.
    for name in ("urllib3", "urllib3.exceptions"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from torch.distributed.elastic.rendezvous import RendezvousParameters, etcd_rendezvous
    from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as v2

    def make(backend: str, endpoint: str, conf: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        client, rendezvous = Recorder(), Recorder()
        for module in (etcd_rendezvous, v2):
            monkeypatch.setattr(module.etcd, "Client", client)
        monkeypatch.setattr(etcd_rendezvous, "EtcdRendezvous", rendezvous)
        monkeypatch.setattr(v2, "EtcdStore", lambda *_: None)
        config = api.LaunchConfig(1, 2, 1, run_id="job", rdzv_backend=backend, rdzv_configs=dict(conf))
        parameters = RendezvousParameters(backend, endpoint, "job", 1, 2, **config.rdzv_configs)
        if backend == "etcd":
            etcd_rendezvous.create_rdzv_handler(parameters)
        else:
            made, _ = v2.create_backend(parameters)
            rendezvous.given["key"] = made._key
        return client.given, rendezvous.given

    return make


def ours(backend: str, endpoint: str, conf: Mapping[str, str]) -> EtcdRendezvous:
    """Return our values of the same flags."""
    return of_flags(backend, endpoint, "job", conf=conf, environment={})


def check_client(client: dict[str, Any], found: EtcdRendezvous) -> None:
    """Check that both use the same etcd in the same way."""
    (place,) = found.address.endpoints
    assert (place.host, place.port) == (client["0"], client["1"])
    tls = found.address.tls
    assert (client["protocol"] == "https") == (tls is not None)
    if tls is not None:
        given = client["cert"]
        certificate, key = given if isinstance(given, tuple) else (given, given)
        assert [_text(tls.certificate), _text(tls.key), _text(tls.ca)] == [
            certificate,
            key,
            client["ca_cert"],
        ]


def _text(path: object) -> str | None:
    return None if path is None else str(path)


@pytest.mark.parametrize(("endpoint", "conf"), CASES)
def test_etcd(torchs: Any, endpoint: str, conf: Mapping[str, str]) -> None:
    """Endpoint, protocol, certificates, prefix, and the wait for nodes; torchrun's own default is included."""
    client, rendezvous = torchs("etcd", endpoint, conf)
    found = ours("etcd", endpoint, conf)
    check_client(client, found)
    prefix = rendezvous["prefix"].strip("/")
    assert found.address.prefix == f"/{prefix}/{rendezvous['run_id']}"
    settings = split_conf(found.conf, "etcd")[0].settings
    assert float(settings["join_timeout"]) == rendezvous["timeout"]
    assert float(settings.get("last_call_timeout", 30)) == rendezvous["last_call_timeout"]


@pytest.mark.parametrize(("endpoint", "conf"), V2_CASES)
def test_etcd_v2(torchs: Any, endpoint: str, conf: Mapping[str, str]) -> None:
    """The other backend has other names for the same settings, and its own prefix in etcd."""
    client, rendezvous = torchs("etcd-v2", endpoint, conf)
    found = ours("etcd-v2", endpoint, conf)
    check_client(client, found)
    assert found.address.prefix == rendezvous["key"]
    settings = split_conf(found.conf, "etcd")[0].settings
    assert float(settings.get("read_timeout", 60)) == client["read_timeout"]


@pytest.mark.parametrize(("backend", "endpoint", "conf"), REFUSED)
def test_flags_that_torch_refuses_are_refused(
    torchs: Any, backend: str, endpoint: str, conf: Mapping[str, str]
) -> None:
    """torch refuses it with a traceback, we with one line."""
    with pytest.raises(ValueError):  # noqa: PT011 (torch's has no type of its own)
        torchs(backend, endpoint, conf)
    with pytest.raises(SettingError):
        ours(backend, endpoint, conf)
