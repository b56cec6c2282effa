"""Makes harmful requests to an agent harmless: the host must survive every attack."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from rallypoint.agent.job.options import OPTIONS
from rallypoint.agent.supervisor.spec import FIELDS

# Methods that end jobs. Without a name they would end the bystander, which nothing in the attack may name.
_ENDING = ("StopJob", "Drain", "ReapWorker", "RestartWorkers")
HARMLESS_COMMANDS = (["/bin/true"], ["/bin/sleep", "5"], ["/nonexistent"])
"""The only commands that the attack makes an agent run."""

# Numbers above the first column cost the host more than a test should; agents refuse those above the second.
_MOST = {"local_world_size": (2, 16_384), "max_restarts": (1, 1_000_000)}
# Options with which a job itself runs programs, and writes files.
_HARMLESS_FIELDS = {"role", "topology", "log-dir", "shutdown-timeout"}
_HARMFUL = OPTIONS.keys() - {"tee", "log-max-size", "keep-attempts", "drain-timeout"}


def harmless_job(method: MethodDescriptor, data: bytes) -> bytes:
    """Return the bytes of a request, or of one that ends no unnamed job, and runs none but harmless programs.

    Bytes that are no request stay: the agent refuses them.
    """
    if method.name not in (*_ENDING, "LaunchJob"):
        return data
    request: Any = GetMessageClass(method.input_type)()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return data
    if method.name == "LaunchJob":
        return data if not _tame(request.spec) else bytes(request.SerializeToString())
    if request.run_id:
        return data
    request.run_id = "run-0"
    return bytes(request.SerializeToString())


def _tame(spec: Any) -> bool:
    """Remove harmful values from a job; return True if there was any."""
    before = spec.SerializeToString(deterministic=True)
    command = list(spec.command)
    if (
        command
        and command[0]
        and not any("\0" in part for part in command)
        and command not in HARMLESS_COMMANDS
    ):
        spec.command[:] = ["/nonexistent"]
    for name, (most, refused) in _MOST.items():
        if most < getattr(spec, name) <= refused:
            setattr(spec, name, most)
    if ".." in PurePath(spec.log_dir).parts or spec.log_dir.startswith("/"):
        spec.log_dir = "logs"
    for name in [name for name in spec.options if name.replace("_", "-") in _HARMFUL]:
        del spec.options[name]
    for name, field in FIELDS.items():
        if name in _HARMFUL - _HARMLESS_FIELDS:
            spec.ClearField(field)
    return bool(spec.SerializeToString(deterministic=True) != before)
