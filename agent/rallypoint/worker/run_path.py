"""`python -m rallypoint.worker.run_path PROGRAM …`: a worker of `--run-path`, as in torchrun.

`runpy.run_path` runs PROGRAM: a script, or a folder or zip file with a `__main__.py`. Its exceptions are recorded. The
folder of a script is not put on `sys.path`; a folder or zip file is.
"""

from __future__ import annotations

import runpy
import sys

from rallypoint.worker.record import record


@record
def run_path(program: str) -> None:
    """Run a program as `__main__`."""
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        del sys.path[0]  # the working directory, which `-m` put there
    del sys.argv[0]
    run_path(sys.argv[0])
