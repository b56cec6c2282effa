"""Write a worker's exception into a file for its agent."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rallypoint.worker.unrecoverable import UNRECOVERABLE, Unrecoverable

if TYPE_CHECKING:
    from typing import ParamSpec  # Python 3.10

    _P = ParamSpec("_P")
_R = TypeVar("_R")

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

# Characters. The agent refuses files above 4 MiB, and an exception may quote a whole tensor.
_MAX_MESSAGE = 64 * 1024
_MAX_CALLSTACK = 256 * 1024


def record(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a worker's main function, so that the agent's report contains the exception that ended it.

    The exception is written to the file named by TORCHELASTIC_ERROR_FILE, in torch's format, so that torch's agent
    can read it too, and then raised. Without that variable no file is written. Python's faulthandler is turned on as
    well, so that a crash in native code leaves a traceback in the log.

    `sys.exit(0)` inside the function returns None; any other SystemExit is raised and not recorded. In a child process
    that the function has forked nothing is recorded: the worker is its parent.

    Around a launch (`elastic_launch`), the failure of the launched worker is written, not the launching program's.

    `Unrecoverable` is recorded as such, printed like an uncaught exception, and ends the worker with exit code 93.

    Use it once, on the outermost function:

        @record
        def main() -> None: ...

        if __name__ == "__main__":
            main()
    """

    @functools.wraps(function)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        worker = os.getpid()
        with contextlib.suppress(Exception):  # no real standard error, as in a notebook
            faulthandler.enable(all_threads=True)
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            if error.code == 0:
                return None
            raise
        except Exception as error:
            raised_at, timestamp = time.monotonic(), time.time()
            path = os.environ.get(ERROR_FILE_VARIABLE)
            if os.getpid() != worker:
                raise
            if path:
                launched = getattr(error, "write_reply_file", None)
                if launched is not None:
                    launched(path)
                else:
                    write_error_file(error, path, timestamp, raised_at)
            if isinstance(error, Unrecoverable):
                sys.excepthook(type(error), error, error.__traceback__)
                raise SystemExit(UNRECOVERABLE) from error
            raise

    return recorded


def write_error_file(error: Exception, path: str, timestamp: float, raised_at: float | None = None) -> None:
    """Write an exception to a file, completely or not at all; report a failed write on standard error.

    The format is torch's. Our fields are in an object beside its timestamp, which counts whole seconds.

    Args:
        path: The file; an existing one is replaced.
        timestamp: Time of the exception, in Unix seconds.
        raised_at: The same in monotonic seconds, which order the failures of a host; None: now.
    """
    callstack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ is broken too
        message = f"{type(error).__name__}: <no text: its __str__ raised>"
    content = {
        "message": {
            "message": message[:_MAX_MESSAGE],
            "extraInfo": {
                "py_callstack": callstack[-_MAX_CALLSTACK:],
                "timestamp": str(int(timestamp)),
                "rallypoint": {
                    "time": float(timestamp),
                    "monotonic": time.monotonic() if raised_at is None else raised_at,
                    "permanent": isinstance(error, Unrecoverable),
                },
            },
        }
    }
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError as problem:
        sys.stderr.write(f"rallypoint: the error file {path} can't be written: {problem.strerror}\n")
        with contextlib.suppress(OSError):
            os.unlink(temporary)
