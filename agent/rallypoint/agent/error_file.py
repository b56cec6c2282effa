"""What a worker has written down of its failure: the error file of `record`, ours or torch's."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 4 << 20  # bytes; what is longer is cut off, and then makes no sense


@dataclass(frozen=True, slots=True)
class Story:
    """A worker's own words.

    Attributes:
        message: what was raised; empty if it does not say.
        traceback: where; empty likewise.
        permanent: whether it says that no restart can mend it.
        written: when the file was written, in Unix seconds by the clock of its file system. Finer than the timestamp
            in torch's format, which counts whole seconds, but no finer than the kernel's tick of some milliseconds.
        raised_at: when it was raised, in monotonic seconds of the host; None in a file of torch's.
    """

    message: str
    traceback: str
    permanent: bool
    written: float
    raised_at: float | None


def read_error_file(path: Path) -> Story | None:
    """Reads an error file; None if there is nothing, or nothing that makes sense."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST))
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return Story(message, "", permanent=False, written=written, raised_at=None)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    ours = extra.get("rallypoint")
    ours = ours if isinstance(ours, dict) else {}
    text, callstack, raised_at = message.get("message"), extra.get("py_callstack"), ours.get("monotonic")
    return Story(
        message=text if isinstance(text, str) else "",
        traceback=callstack.rstrip() if isinstance(callstack, str) else "",
        permanent=ours.get("permanent") is True,
        written=written,
        raised_at=raised_at if isinstance(raised_at, float) and math.isfinite(raised_at) else None,
    )
