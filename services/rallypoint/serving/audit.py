"""The audit log: the actions of operators, and refused calls. A line of JSON each, in the log and in a file.

It outlives the runs and their events.
"""

from __future__ import annotations

import json
import logging.handlers
import os
import sys
import time
from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.text import clip
from rallypoint.serving.flow import Bucket, Buckets, Rate, client_of

log = get_logger(__name__)

# Refusals that are written, of a client and of all: a client that is refused all the time must fill neither disk nor
# log.
_REFUSALS, _ALL_REFUSALS = Rate(10, 100), Rate(100, 1_000)
_MOST_CLIENTS = 1_024
# Bounds of an entry: bytes of a text, and items of a list.
_LONGEST, _MOST = 1_024, 100
# Fields whose values may be secrets: only their keys are written.
_SECRET = ("environment",)


class Audit:
    """Writes to the log, and to a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, which is appended to and may be rotated by others.

        Raises:
            SettingError: It can't be opened; one line.
        """
        try:
            self._file = None if path is None else _AuditFile(path)
        except OSError as error:
            raise SettingError(f"cannot write to --audit-log {path}: {error.strerror}") from None
        self._refusals = Buckets(_REFUSALS, _MOST_CLIENTS)
        self._all_refusals = Bucket(_ALL_REFUSALS, time.monotonic())
        self._left_out = 0

    def allowed(self, method: str, name: str, peer: str, runs: Collection[str], request: Message) -> None:
        """Write that an operator's call begins, with its request."""
        try:
            content: object = _bounded(MessageToDict(request, preserving_proto_field_name=True))
        except json_format.Error as error:  # a time out of range, for example
            content = clip(str(error), _LONGEST)
        self._write("operator call", method, name, peer, runs, request=content)

    def refused(self, method: str, name: str, peer: str, runs: Collection[str], problem: str) -> None:
        """Write that a call was refused, unless too many of this client or of all were of late."""
        now = time.monotonic()
        if self._refusals.take(client_of(peer), now) > 0.0 or self._all_refusals.take(now) > 0.0:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self._write(
            "call refused", method, name, peer, runs, problem=clip(problem, _LONGEST), left_out=left_out
        )

    def _write(
        self, event: str, method: str, name: str, peer: str, runs: Collection[str], **more: object
    ) -> None:
        named = _bounded([run for run in runs if run])
        entry = {"method": method[1:], "caller": clip(name, _LONGEST), "peer": peer, "runs": named, **more}
        log.info(event, **entry)
        if self._file is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            self._file.write(json.dumps({"time": now, "event": event, **entry}))


class _AuditFile(logging.handlers.WatchedFileHandler):
    """A file that is opened again after it was renamed; a new one has mode 0600."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def _open(self) -> TextIOWrapper[Any]:
        return open(self.baseFilename, "a", encoding="utf-8", opener=partial(os.open, mode=0o600))

    def write(self, line: str) -> None:
        """Append a line. A failure is logged, and calls go on."""
        try:
            self.handle(logging.makeLogRecord({"msg": line}))
        except OSError as error:
            self._failed(error)

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed(sys.exc_info()[1])

    def _failed(self, error: BaseException | None) -> None:
        log.error("cannot write to the audit log", path=self.baseFilename, cause=str(error))


def _bounded(value: Any, key: str = "") -> Any:
    """Return a value with its texts and lists cut, and without secrets."""
    if isinstance(value, str):
        return clip(value, _LONGEST, "...")
    if isinstance(value, list):
        return [_bounded(each) for each in value[:_MOST]]
    if not isinstance(value, dict):
        return value
    if key in _SECRET:
        return _bounded(sorted(value))
    return {clip(name, _LONGEST): _bounded(each, name) for name, each in islice(value.items(), _MOST)}
