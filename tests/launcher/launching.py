"""A program that launches, as users write them; arguments: mode, folder and start method."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from rallypoint.launcher import LaunchConfig, WorkersFailedError, elastic_launch

MODE, FOLDER, METHOD = sys.argv[1:4]


class Own:
    """A class of the main module."""

    def __init__(self, value: int) -> None:
        self.value = value


def own(value: int) -> Own:
    """A function of the main module that returns an object of its own class."""
    print(f"{__name__} prints")  # noqa: T201
    return Own(value + int(os.environ["RANK"]))


def linger() -> None:
    """Live until a signal, and create a file for it."""
    from launcher import calls

    calls.linger(FOLDER)


def tree() -> None:
    """Start a child and a daemon, and ignore SIGTERM."""
    from support.processes import STUBBORN

    sys.argv = ["stubborn", os.environ["MARKER"], FOLDER]
    exec(STUBBORN, {})  # noqa: S102 (ours)


def count(lock: threading.Lock, kept: list[int]) -> int:
    """Use an object that can't be pickled, and change an argument."""
    with lock:
        kept.append(1)
        return len(kept)


def config(**more: object) -> LaunchConfig:
    """Return a configuration for two workers of this host."""
    return LaunchConfig(1, 1, 2, start_method=METHOD, log_dir=Path(FOLDER, "logs"), **more)  # type: ignore[arg-type]


def main() -> None:
    """Run the requested mode."""
    if MODE == "results":
        results = elastic_launch(config(), own)(5)
        again = elastic_launch(config(), own)(7)
        print({rank: type(box) is Own and box.value for rank, box in {**results, **again}.items()})  # noqa: T201
        print("grpc" in sys.modules)  # noqa: T201
    elif MODE == "closure":
        lock, kept = threading.Lock(), list[int]()
        print("not to be printed twice", end=" ")  # noqa: T201
        print(elastic_launch(config(), lambda: count(lock, kept))())  # noqa: T201
        print(kept)  # noqa: T201
    elif MODE == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            elastic_launch(config(), own)(1)
        print([(warning.category.__name__, Path(warning.filename).name) for warning in caught])  # noqa: T201
    elif MODE == "unguarded":
        elastic_launch(config(max_restarts=0), own)(1)
    elif MODE == "tree":
        elastic_launch(config(), tree)()
    else:
        if MODE == "handled":
            signal.signal(signal.SIGTERM, lambda number, _frame: print(f"handler: {number}", flush=True))  # noqa: T201
        before = (
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            signal.getsignal(signal.SIGUSR1),
        )
        try:
            elastic_launch(config(), linger)()
        except WorkersFailedError as error:
            print("failed", error.exit_code, error.failure)  # noqa: T201
        except BaseException as error:
            print(type(error).__name__, error, flush=True)  # noqa: T201
            raise
        finally:
            after = (
                signal.getsignal(signal.SIGINT),
                signal.getsignal(signal.SIGTERM),
                signal.getsignal(signal.SIGUSR1),
            )
            print("restored", before == after, flush=True)  # noqa: T201


if MODE == "unguarded" or __name__ == "__main__":
    main()
