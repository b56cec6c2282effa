"""torch's etcd URL and flags have the same meaning here, and an impossible one is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.launcher.etcd_url import of_flags, of_url
from rallypoint.rpc.endpoint import ClientTLS, Endpoint, FileNames, SettingError

HOST = Endpoint("head", 2379)
PASSWORD = {"RALLYPOINT_ETCD_PASSWORD": "secret"}


def url(text: str, environment: Mapping[str, str] | None = None, **beside: Any) -> Any:
    """Parse a URL."""
    return of_url(text, environment=environment or {}, **beside)


def flags(
    endpoint: str = "head",
    conf: Mapping[str, str] | None = None,
    backend: str = "etcd",
    run_id: str = "job",
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Parse flags."""
    return of_flags(backend, endpoint, run_id, conf=conf, environment=environment or {})


def test_a_url_with_everything() -> None:
    """Each parameter of torch's sets the value with its meaning."""
    found = url(
        "etcd://head:4001/job-1?min_workers=2&max_workers=5&timeout=60&last_call_timeout=3&etcd_prefix=/jobs/p"
        "&protocol=https&cert=/c.pem&key=/k.pem&cacert=/a.pem"
    )
    tls = ClientTLS(Path("/a.pem"), Path("/c.pem"), Path("/k.pem"))
    assert found.address == EtcdAddress((Endpoint("head", 4001),), "/jobs/p/job-1", tls)
    assert (found.run_id, found.nodes) == ("job-1", (2, 5))
    assert found.conf == {"join_timeout": "60", "last_call_timeout": "3"}


def test_a_url_with_nothing() -> None:
    """torch's defaults: port 2379, http, /torchelastic/p2p, 600 s; the last call of 30 s is ours too."""
    found = url("etcd://head/job")
    assert found.address == EtcdAddress((HOST,), "/torchelastic/p2p/job")
    assert found.nodes is None
    assert found.conf == {"join_timeout": "600"}


@pytest.mark.parametrize(
    ("backend", "prefix", "conf"),
    [
        # torchrun itself makes every backend wait for 900 s; etcd-v2 has join_timeout, and 600 s.
        ("etcd", "/torchelastic/p2p/job", {"join_timeout": "900"}),
        ("etcd-v2", "/torch/elastic/rendezvous/job", {}),
    ],
)
def test_flags_with_nothing(backend: str, prefix: str, conf: Mapping[str, str]) -> None:
    """Each of torch's two backends has its own prefix in etcd; the default endpoint is this host."""
    found = flags("", backend=backend)
    assert found.address == EtcdAddress((Endpoint("localhost", 2379),), prefix)
    assert found.conf == conf


@pytest.mark.parametrize("names", [("cert", "key", "cacert"), ("ssl_cert", "ssl_cert_key", "ca_cert")])
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_both_spellings_of_certificates_are_known(backend: str, names: tuple[str, ...]) -> None:
    """torch's two backends have one each, and silently ignore the other one."""
    conf = {**dict(zip(names, ("/c", "/k", "/a"), strict=True)), "protocol": "HTTPS"}
    assert flags(conf=conf, backend=backend).address.tls == ClientTLS(Path("/a"), Path("/c"), Path("/k"))


def test_settings_of_a_run_are_passed_on() -> None:
    """Our settings, and those of torch's dynamic rendezvous, which etcd-v2 is, are passed on."""
    others = {"keep_alive_interval": "1", "read_timeout": "9", "rank_policy": "sorted"}
    assert flags(conf={**others, "timeout": "7"}).conf == {**others, "join_timeout": "7"}
    assert flags(conf=others, backend="etcd-v2").conf == others
    assert url("etcd://head/job", conf=others).conf == {**others, "join_timeout": "600"}


@pytest.mark.parametrize(
    ("hosts", "endpoints"),
    [
        ("a:1,b:2", (Endpoint("a", 1), Endpoint("b", 2))),
        ("a,b:2", (Endpoint("a", 2379), Endpoint("b", 2))),
        ("[fd00::1],[fd00::2]:3", (Endpoint("fd00::1", 2379), Endpoint("fd00::2", 3))),
    ],
)
def test_all_members_of_a_cluster_may_be_named(hosts: str, endpoints: tuple[Endpoint, ...]) -> None:
    """torch accepts only one, and fails with it."""
    assert url(f"etcd://{hosts}/job").address.endpoints == endpoints
    assert flags(hosts).address.endpoints == endpoints


@pytest.mark.parametrize(("prefix", "space"), [("/", "/job"), ("/a", "/a/job"), ("a/b/", "/a/b/job")])
def test_the_prefix_of_a_run_in_etcd(prefix: str, space: str) -> None:
    """Slashes around a prefix have no meaning: torch's own example has none."""
    assert url(f"etcd://head/job?etcd_prefix={prefix}").address.prefix == space


def test_no_run_is_inside_another_one() -> None:
    """A name with slashes is one path element, so that it can't name keys of another run."""
    found = url("etcd://head/team/job?etcd_prefix=/p")
    assert (found.run_id, found.address.prefix) == ("team/job", "/p/team%2Fjob")
    assert flags(run_id="a%2Fb").address.prefix != flags(run_id="a/b").address.prefix


def test_min_workers_is_the_default_number_of_nodes() -> None:
    """torch does so too; it may be given twice, if both are the same."""
    assert url("etcd://head/job?min_workers=3").nodes == (3, 3)
    assert url("etcd://head/job?min_workers=1&max_workers=3", nodes=(1, 3)).nodes == (1, 3)
    assert url("etcd://head/job", nodes=(1, 3)).nodes == (1, 3)


def test_a_user_has_a_password_from_the_environment() -> None:
    """`ps` does not show it there; the URL may have it too. A variable for another cluster is no mistake."""
    found = url("etcd://me@head/job", PASSWORD).address
    assert (found.user, found.password) == ("me", "secret")
    in_the_url = url("etcd://me:own%40@head/job", PASSWORD).address
    by_flags = flags("me@head", environment=PASSWORD).address
    without_user = url("etcd://head/job", PASSWORD).address
    assert [each.password for each in (in_the_url, by_flags, without_user)] == ["own@", "secret", ""]
    assert "secret" not in repr(found)


def test_one_file_may_be_certificate_and_key() -> None:
    """torch's client does so if no key is given."""
    assert flags(conf={"protocol": "https", "cert": "/c"}).address.tls == ClientTLS(
        None, Path("/c"), Path("/c")
    )


def test_a_file_is_called_as_it_was_given() -> None:
    """Errors in the file are detected when it is read."""
    tls = url("etcds://head/job?cert=/c", conf={"ssl_cert_key": "/k", "ca_cert": "/a"}).address.tls
    assert tls.names == FileNames(
        "cert of the --rdzv-endpoint URL", "--rdzv-conf ssl_cert_key", "--rdzv-conf ca_cert"
    )
    both = flags(conf={"protocol": "https", "cert": "/c"}).address.tls.names
    assert (both.certificate, both.key) == ("--rdzv-conf cert", "--rdzv-conf cert")


def test_https_by_the_scheme() -> None:
    """Without a CA, the public roots are used."""
    assert url("etcds://head/job").address.tls == ClientTLS()
    assert url("etcds://head/job?protocol=https").address.tls == ClientTLS()


@pytest.mark.parametrize(
    ("text", "beside", "told"),
    [
        ("etcd://head", {}, "which run is this? Give --rdzv-id NAME"),
        ("etcd:///job", {}, "has an empty host"),
        ("etcd://a,,b/job", {}, "has an empty host"),
        ("etcd://a:0/job", {}, "has port '0', expected a number from 1 to 65535"),
        ("etcd://fd00::1/job", {}, "put an IPv6 address in brackets"),
        ("etcd://a,a:2379/job", {}, "names a:2379 twice"),
        ("etcd://a/job x", {}, "has a space"),
        ("etcd://a/job#x", {}, "has a # in it"),
        ("etcd://a/job?min_workers", {}, "is not name=value"),
        ("etcd://a/job?min_workers=", {}, "has min_workers without a value"),
        ("etcd://a/job?min_workers=1&min_workers=2", {}, "has min_workers twice, as 1 and 2"),
        (
            "etcd://a/job?workers=1",
            {},
            "has the parameter 'workers', expected one of min_workers, max_workers",
        ),
        ("etcd://a/job?join_timeout=1", {}, "other settings of a run go into --rdzv-conf"),
        ("etcd://a/job?max_workers=2", {}, "has max_workers without min_workers"),
        ("etcd://a/job?min_workers=0", {}, "has min_workers=0, expected a number of nodes, 1 to"),
        ("etcd://a/job?min_workers=x", {}, "has min_workers=x, expected a number of nodes, 1 to"),
        (
            "etcd://a/job?min_workers=3&max_workers=2",
            {},
            "has max_workers=2, which is less than min_workers=3",
        ),
        ("etcd://a/job?min_workers=1&max_workers=2", {"nodes": (2, 2)}, "contradicts --nnodes 2:2"),
        ("etcd://a/job", {"run_id": "other"}, "names the run 'job', which contradicts --rdzv-id other"),
        ("etcd://a/job?timeout=0", {}, "has timeout=0, expected a number of seconds, 0.001 to"),
        ("etcd://a/job?timeout=nan", {}, "has timeout=nan, expected a number of seconds"),
        ("etcd://a/job?timeout=10m", {}, "has timeout=10m, expected a number of seconds"),
        (
            "etcd://a/job?last_call_timeout=-1",
            {},
            "has last_call_timeout=-1, expected a number of seconds, 0 to",
        ),
        ("etcd://a/job?timeout=5", {"conf": {"timeout": "6"}}, "contradicts --rdzv-conf timeout=6"),
        ("etcd://a/job?timeout=5", {"conf": {"join_timeout": "6"}}, "contradicts --rdzv-conf join_timeout=6"),
        (
            "etcd://a/job?last_call_timeout=5",
            {"conf": {"last_call_timeout": "6"}},
            "contradicts --rdzv-conf last",
        ),
        ("etcd://a/job", {"conf": {"timeout": "soon"}}, "--rdzv-conf has timeout=soon"),
        (
            "etcd://a/job",
            {"conf": {"min_workers": "2"}},
            "--rdzv-conf: min_workers is a parameter of the etcd:// URL",
        ),
        ("etcd://a/job", {"conf": {"protocol": "ftp"}}, "--rdzv-conf has protocol='ftp' for etcd"),
        (
            "etcd://a/job?protocol=ftp",
            {},
            "'etcd://a/job?protocol=ftp' has protocol='ftp' for etcd, expected http or https",
        ),
        (
            "etcd://a/job?cacert=/a",
            {},
            "cacert of the --rdzv-endpoint URL is for etcd with TLS, which contradicts",
        ),
        (
            "etcd://a/job?protocol=https&key=/k",
            {},
            "key of the --rdzv-endpoint URL is that of cert, which is missing",
        ),
        ("etcds://a/job?protocol=http", {}, "is https by its scheme, which contradicts protocol=http"),
        ("etcd://a/job?etcd_prefix=/a%20b", {}, "has etcd_prefix='/a b' with a space or an empty part"),
        ("etcd://a/job?etcd_prefix=/a//b", {}, "has etcd_prefix='/a//b' with a space or an empty part"),
        (f"etcd://a/job?etcd_prefix=/{'a' * 600}", {}, "expected at most 512: shorten one of them"),
        ("etcd://me@a/job", {}, "has user 'me' and no password: set RALLYPOINT_ETCD_PASSWORD"),
        ("etcd://me:@a/job", {}, "has an empty password"),
        ("etcd://:hidden@a/job", {}, "has a password and no user before the @"),
        ("etcd://me:hidden@/job", {}, "has an empty host"),
        ("etcd://me:hid/den@a/job", {}, "'etcd://me:***@a/job' has an @ behind a / or ?"),
        ("etcd://me:hid?den@a/job", {}, "'etcd://me:***@a/job' has an @ behind a / or ?"),
        ("etcd://me:hid\nden@a/job", {}, "'etcd://me:***@a/job' has a space or control character"),
        ("etcd://me@a/job?password=hidden", {}, "has the parameter 'password', expected one of"),
        ("etcd://me:hidden@a/job?x=1", {}, "'etcd://me:***@a/job?x=1' has the parameter 'x'"),
    ],
)
def test_an_invalid_url_is_reported_in_one_line(text: str, beside: dict[str, Any], told: str) -> None:
    """The line has the mistake and the expected form, and never the password."""
    with pytest.raises(SettingError, match=re.escape(told)) as caught:
        url(text, **beside)
    assert "\n" not in str(caught.value)
    assert not re.search("hid|den", str(caught.value))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"run_id": ""}, "which run is this? Give --rdzv-id NAME"),
        ({"endpoint": "a:x"}, "has port 'x', expected a number from 1 to 65535"),
        ({"endpoint": "me:hidden@a:x"}, "'me:***@a:x'"),
        ({"endpoint": "me:hid/den@a:x"}, "'me:***@a:x'"),
        ({"endpoint": "http://me:hidden@a:1"}, "'http://me:***@a:1' has a /: expected [USER@]HOST[:PORT]"),
        ({"endpoint": "me:@a"}, "has an empty password"),
        ({"conf": {"protocol": "ftp"}}, "--rdzv-conf has protocol='ftp' for etcd, expected http or https"),
        ({"conf": {"etcd_prefix": "/a b"}}, "--rdzv-conf has etcd_prefix='/a b' with a space"),
        ({"conf": {"protocol": "https", "ssl_cert_key": "/k"}}, "--rdzv-conf ssl_cert_key is that of cert"),
        ({"conf": {"min_workers": "1"}}, "as a flag it is --nnodes MIN:MAX"),
        ({"conf": {"timeout": "soon"}}, "--rdzv-conf has timeout=soon, expected a number of seconds"),
        ({"conf": {"timeout": "1", "join_timeout": "2"}}, "timeout=1 contradicts --rdzv-conf join_timeout=2"),
        ({"conf": {"cert": "/a", "ssl_cert": "/b"}}, "ssl_cert=/b contradicts cert=/a, which is the same"),
        ({"conf": {"cert": "/a"}}, "--rdzv-conf cert is for etcd with TLS, which contradicts protocol=http"),
    ],
)
def test_invalid_flags_are_reported_in_one_line(given: dict[str, Any], told: str) -> None:
    """The line has the mistake."""
    with pytest.raises(SettingError, match=re.escape(told)) as caught:
        flags(**given)
    assert "\n" not in str(caught.value)
    assert not re.search("hid|den", str(caught.value))
