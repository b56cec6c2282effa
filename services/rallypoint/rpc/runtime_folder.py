"""This user's runtime folder: the Unix sockets of this host's services, and the secret that its processes share.

Only the user (and root) can enter the folder, so the kernel keeps other users from its sockets. Files of services in
other folders are kept from other users by their mode.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rallypoint.rpc.endpoint import LONGEST_SOCKET_PATH, RunSecret, SettingError

ENVIRONMENT_VARIABLE = "RALLYPOINT_RUNTIME_DIR"

# Characters of a run's name that stay in the name of a file; of a longer or other name, a hash is used.
_PLAIN = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,40}")
_SECRET = "secret"  # noqa: S105 (the name of a file)
_SUFFIX = ".sock"
# Eight hexadecimal digits, in a pattern; any character would also match a longer name of another run.
_NUMBER = "[0-9a-f]" * 8
_SECRET_SUFFIX = ".secret"  # noqa: S105 (the end of a file's name)
_MOST_NAMES = 20  # of runs in one line
# Seconds that a server has from the making of its socket's file to listening.
_STARTING = 60.0


def runtime_folder() -> Path:
    """Return the folder; it is made if it is missing.

    It is $RALLYPOINT_RUNTIME_DIR, else `rallypoint` in $XDG_RUNTIME_DIR, else /run/rallypoint for root, else
    /tmp/rallypoint-UID.

    Raises:
        SettingError: The folder can't be made, or others than this user may enter it; one line.
    """
    folder = _chosen()
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        status = folder.lstat()
    except OSError as error:
        raise SettingError(
            f"can't make {folder}, the folder of this user's sockets: {error.strerror}; "
            f"set {ENVIRONMENT_VARIABLE} to another one"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SettingError(
            f"{folder} must be a folder that only this user can enter (mode 0700): it would hold sockets with which "
            f"jobs are controlled; remove it, or set {ENVIRONMENT_VARIABLE} to another one"
        )
    return folder


def _chosen() -> Path:
    if given := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(given).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK | os.X_OK):
        return Path(session, "rallypoint")
    if os.geteuid() == 0:
        return Path("/run/rallypoint")
    return Path(f"/tmp/rallypoint-{os.geteuid()}")  # noqa: S108 (its owner and mode are checked)


# ---- Sockets: of the roles, found by the role's name, and of the services inside an agent, found by the run's.


def role_socket(role: str) -> str:
    """Return the endpoint of a role's service of this user on this host: `rendezvous`, `timer` or `agent`."""
    return f"unix:{runtime_folder() / role}{_SUFFIX}"


def run_socket(role: str, run_id: str) -> str | None:
    """Return the endpoint of a role's service inside an agent of a run on this host; None: there is none."""
    return next(iter(_served(f"{_run_name(run_id)}.{role}.{_NUMBER}{_SUFFIX}")), None)


def _served(pattern: str) -> list[str]:
    """Return the endpoints of the sockets of a pattern at which a process listens."""
    if not _chosen().exists():
        return []  # and it may be impossible to make: a container's files can be read-only
    return [
        endpoint for path in sorted(runtime_folder().glob(pattern)) if is_served(endpoint := f"unix:{path}")
    ]


class SeveralRuns(SettingError):
    """Several runs have a service of a role on this host, at these endpoints."""

    def __init__(self, text: str, role: str, endpoints: list[str]) -> None:
        super().__init__(text)
        self.role, self.endpoints = role, endpoints


def found_socket(role: str, run_id: str) -> str:
    """Return the endpoint of the service of a role to ask about a run; if `run_id` is empty, about any.

    It is inside the run's agent, or the role's own, or inside the supervisor of this host (which also serves
    rendezvous). Without a run's name, an agent's is taken too if it is of the only run.

    Raises:
        SeveralRuns: Without a run's name, several runs have one; one line.
    """
    if run_id and (found := run_socket(role, run_id)):
        return found
    own = role_socket(role)
    if not is_served(own):
        if found := run_socket(role, ""):
            return found
        if role == "rendezvous" and is_served(supervisor := role_socket("agent")):
            return supervisor
        served = [] if run_id else _served(f"run-*.{role}.{_NUMBER}{_SUFFIX}")
        names = sorted(
            {Path(endpoint).name.split(f".{role}.")[0].removeprefix("run-") for endpoint in served}
        )
        if len(names) > 1:
            raise SeveralRuns(
                f"this host has {len(names)} runs: {', '.join(names[:_MOST_NAMES])}; "
                f"give RUN_ID, or the address, as in {served[0]}",
                role,
                served,
            )
        if served:
            return served[0]
    return own


@contextmanager
def new_run_socket(role: str, run_id: str, secret: RunSecret | None = None) -> Iterator[str]:
    """Yield a free endpoint for a service inside an agent of a run, and remove its file at the end.

    Args:
        run_id: Name of the run; empty: of several runs.
        secret: A secret of the run, for clients that are redirected to another host; see `secret_beside`.

    Raises:
        SettingError: The folder can't be used; one line.
    """
    folder = runtime_folder()
    _remove_dead(folder)
    # A number, since several agents of a run may be on this host.
    path = folder / f"{_run_name(run_id)}.{role}.{secrets.token_hex(4)}{_SUFFIX}"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SettingError(
            f"{folder} is too long for the folder of sockets, whose paths have at most {LONGEST_SOCKET_PATH} bytes: "
            f"set {ENVIRONMENT_VARIABLE} to a shorter one"
        )
    beside = path.with_suffix(_SECRET_SUFFIX)
    try:
        if secret is not None:
            _write_secret(beside, secret)
        yield f"unix:{path}"
    finally:
        path.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)


def secret_beside(endpoint: str) -> RunSecret | None:
    """Return the secret of the run that is served at one of these sockets; None: it has none."""
    path = Path(endpoint.removeprefix("unix:"))
    if not endpoint.startswith("unix:") or path.parent != runtime_folder():
        return None
    try:
        return RunSecret(path.with_suffix(_SECRET_SUFFIX).read_text().strip())
    except OSError:
        return None


def is_served(endpoint: str) -> bool:
    """Return True if a process listens at a Unix socket, as in `unix:/path`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(endpoint.removeprefix("unix:"))
    except BlockingIOError:
        return True  # it listens, and its queue is full
    except OSError:
        return False
    return True


def _run_name(run_id: str) -> str:
    if _PLAIN.fullmatch(run_id):
        return f"run-{run_id}"
    return f"run-{hashlib.sha256(run_id.encode()).hexdigest()[:20]}"


def _remove_dead(folder: Path) -> None:
    """Remove the sockets of agents that were killed: no process listens there, and none will.

    A new file is left alone: a server that starts makes it before it listens.
    """
    for path in folder.glob(f"run-*{_SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STARTING and not is_served(f"unix:{path}"):
                path.unlink()
    for path in folder.glob(f"run-*{_SECRET_SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STARTING and not path.with_suffix(_SUFFIX).exists():
                path.unlink()


# ---- The secret that the processes of this user on this host share, for loopback addresses.


def user_secret() -> RunSecret:
    """Return the secret of this user on this host, which is made at first.

    Raises:
        SettingError: It can't be read or made; one line.
    """
    path = runtime_folder() / _SECRET
    try:
        with suppress(FileExistsError):
            _write_secret(path, RunSecret(secrets.token_hex(32)))
        return RunSecret(path.read_text().strip())
    except OSError as error:
        raise SettingError(f"can't make the secret of this user in {path}: {error.strerror}") from None


def _write_secret(path: Path, secret: RunSecret) -> None:
    """Write a secret for this user's processes, all at once.

    Raises:
        FileExistsError: There is one.
    """
    if path.exists():
        raise FileExistsError
    # mkstemp makes the file with mode 0600. A link appears with its content, and never replaces another process's.
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=".secret-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secret.text)
        os.link(new, path)
    finally:
        os.unlink(new)


# ---- Files of services in other folders.


def open_private(path: str | Path, flags: int) -> int:
    """Open a file that only this user may use, and return its descriptor; may be the `opener` of `open`.

    A new file has mode 0600 from the start, whatever the umask; an existing file of this user gets that mode.

    Raises:
        OSError: It can't be opened, or its mode can't be set.
    """
    file = os.open(path, flags, 0o600)
    try:
        status = os.fstat(file)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file
