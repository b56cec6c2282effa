"""`--rdzv-conf` as torchrun's users write it: torch's keys beside ours, each with its meaning here or a word on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.rpc.endpoint import SettingError

_STATIC_TIMEOUT = "900"  # seconds; torchrun's
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
# Keys of torch's backends that change nothing here, and why.
_MEANINGLESS = {
    "heartbeat_timeout": "a heartbeat here is one message on an open stream",
    "use_libuv": "there is no TCPStore here",
    "rank": "--node-rank says it",
}


@dataclass(frozen=True, slots=True)
class TorchConf:
    """What `--rdzv-conf` says.

    Attributes:
        settings: By the names that `rallypoint.agent.config.settings.rendezvous_conf` knows.
        is_host: Whether this host is to serve rendezvous; None: whoever has the endpoint's address.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    is_host: bool | None = None


def split_conf(pairs: Mapping[str, str], backend: str) -> tuple[TorchConf, tuple[str, ...]]:
    """Give torch's keys their meaning.

    Args:
        pairs: What was given.
        backend: `rallypoint`, `static`, `c10d` or `etcd`: torch's backends read different keys.

    Returns:
        The settings, and a line for each key that has no meaning here.

    Raises:
        SettingError: A value makes no sense; one line.
    """
    settings = dict(pairs)
    notices = []
    is_host = None
    static_timeout = _STATIC_TIMEOUT
    for key, reason in _MEANINGLESS.items():
        if settings.pop(key, None) is not None:
            notices.append(f"--rdzv-conf: {key} has no meaning here: {reason}")
    if (text := settings.pop("is_host", None)) is not None:
        if backend == "c10d":
            is_host = _truth("is_host", text)
        else:
            notices.append("--rdzv-conf: is_host has no meaning here: it belongs to --rdzv-backend c10d")
    if (text := settings.pop("timeout", None)) is not None:
        if backend == "static":
            static_timeout = text
        else:
            notices.append(
                "--rdzv-conf: timeout has no meaning here: join_timeout is how long nodes are waited for"
            )
    if backend == "static":
        # How long torch's static backend waits, for its store as for the other nodes.
        settings.setdefault("read_timeout", static_timeout)
        settings.setdefault("join_timeout", static_timeout)
    if (text := settings.pop("store_type", None)) is not None and text.lower() != "tcp":
        raise SettingError(
            f"--rdzv-conf: store_type={text} is not possible: hosts meet at a service, not at a file; leave it out"
        )
    return TorchConf(settings, is_host), tuple(notices)


def _truth(key: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise SettingError(f"--rdzv-conf: {key}={text!r} is neither true nor false")
