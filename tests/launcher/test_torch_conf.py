"""Each key of torch's --rdzv-conf has its meaning here, or a line reports that it has none."""

from __future__ import annotations

import pytest

from rallypoint.launcher.backends import TorchConf, split_conf
from rallypoint.rpc.endpoint import SettingError


@pytest.mark.parametrize("key", ["heartbeat_timeout", "use_libuv", "rank", "cas_backoff_max_seconds"])
@pytest.mark.parametrize("backend", ["rallypoint", "c10d"])
def test_a_key_without_a_meaning_here_is_reported(backend: str, key: str) -> None:
    """It is removed, so that our own service does not get it."""
    conf, notices = split_conf({key: "5", "join_timeout": "60"}, backend)
    assert conf == TorchConf({"join_timeout": "60"})
    assert [notice.startswith(f"--rdzv-conf: {key} has no meaning here: ") for notice in notices] == [True]


def test_static_waits_as_long_as_torchs() -> None:
    """The timeout holds for the service and for the other nodes; a value for one of them holds for that one alone."""
    assert split_conf({}, "static")[0].settings == {"read_timeout": "900", "join_timeout": "900"}
    conf, notices = split_conf({"timeout": "60", "join_timeout": "5"}, "static")
    assert conf.settings == {"read_timeout": "60", "join_timeout": "5"}
    assert not notices


@pytest.mark.parametrize(
    ("backend", "key"), [("c10d", "timeout"), ("rallypoint", "timeout"), ("rallypoint", "is_host")]
)
def test_a_key_of_another_backend_is_reported(backend: str, key: str) -> None:
    """The notice names its backend, or the key to use instead."""
    conf, notices = split_conf({key: "1"}, backend)
    assert conf.is_host is None
    assert key not in conf.settings
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("text", "host"), [("1", True), ("True", True), ("y", True), ("0", False), ("no", False)]
)
def test_the_serving_host_can_be_set(text: str, host: bool) -> None:
    """All words that torch accepts are accepted."""
    for backend in ("c10d", "static"):
        conf, notices = split_conf({"is_host": text}, backend)
        assert (conf.is_host, notices) == (host, ())


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ({"is_host": "maybe"}, "is_host='maybe' is neither true nor false"),
        ({"store_type": "file"}, "store_type=file is not possible"),
    ],
)
def test_invalid_settings_are_reported_in_one_line(pairs: dict[str, str], told: str) -> None:
    """A file that hosts would share is no service."""
    with pytest.raises(SettingError, match=told):
        split_conf(pairs, "c10d")
    assert split_conf({"store_type": "tcp"}, "c10d") == (TorchConf({}), ())
