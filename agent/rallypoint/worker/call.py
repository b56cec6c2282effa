"""Workers that call a Python function: how they receive the function, and return its result.

Both are pickled into files of one folder. `call` holds multiprocessing's preparation data (the main module of the
user's program, the search path), then the function with its arguments. A worker that has returned leaves
`<round>.<rank>`, and stays until the others of its host have returned.

Run as a program, `python -m rallypoint.worker.call <folder>`, this is one worker of `start_method="spawn"`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, spawn
from pathlib import Path
from typing import Any, NoReturn

from rallypoint.worker.record import record
from rallypoint.worker.unrecoverable import Unrecoverable

_CALL = "call"
_RUNNING = "running"
_LOCAL_RANK = "${local_rank}"


class CallError(Exception):
    """A function can't be sent to the workers, or its result can't be sent back; one line."""


class UnpicklableResult(CallError, Unrecoverable):
    """A worker's result can't be pickled; a restart would not help."""


def describe(function: Callable[..., object]) -> str:
    """Return a function's name, for people."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def save_call(folder: Path, function: Callable[..., object], args: Sequence[object]) -> None:
    """Save a function and its arguments for workers that are not forks of this process.

    Raises:
        CallError: They can't be pickled, or workers can't import the function.
        OSError: The folder can't be written.
    """
    preparation = _preparation()
    if getattr(function, "__module__", None) == "__main__" and not preparation.keys() & _MAIN:
        raise CallError(
            f"{describe(function)} is defined where workers can't import it (a notebook, an interactive session, a "
            "__main__.py): move it into a module, or use start_method='fork'"
        )
    try:
        content = pickle.dumps((function, tuple(args)))
    except Exception as error:
        raise CallError(
            f"{describe(function)} or its arguments can't be pickled ({error}): the function must be at the top of a "
            "module, the arguments plain data; or use start_method='fork'"
        ) from None
    with folder.joinpath(_CALL).open("wb") as file:
        pickle.dump(preparation, file)
        file.write(content)


def load_call(folder: Path) -> Callable[[], object]:
    """Return the call that `save_call` saved, after preparing this process like the one that saved it.

    The user's main module is imported under the name __mp_main__, as in multiprocessing.
    """
    with folder.joinpath(_CALL).open("rb") as file:
        preparation = pickle.load(file)  # noqa: S301 (ours, in a folder of this user's)
        # Detects code at the top of the main module that would launch again: see `is_importing_main`.
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(preparation)
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
        function, args = pickle.load(file)  # noqa: S301
    return bound(function, args)


def bound(function: Callable[..., object], args: Sequence[object]) -> Callable[[], object]:
    """Bind arguments to a function; `${local_rank}` in a text argument is replaced, as in a program's arguments."""

    def call() -> object:
        local_rank = os.environ.get("LOCAL_RANK", "")
        return function(
            *(each.replace(_LOCAL_RANK, local_rank) if isinstance(each, str) else each for each in args)
        )

    return call


def is_importing_main() -> bool:
    """Return True in a worker that is importing the user's main module: its top level must not launch a job."""
    return bool(getattr(process.current_process(), "_inheriting", False))


def run_call(call: Callable[[], object], folder: Path) -> None:
    """Run the worker: make the call, record an exception, save the result, and wait for the other workers here.

    Rank 0 is the host of the others' TCPStore, so it must not end while they may be reading it: as in torch's launcher,
    a worker that has returned stays until all workers of its host have. They all hold one lock in common until then;
    the kernel releases the lock of a worker that dies.
    """
    running = os.open(folder / _RUNNING, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(running, fcntl.LOCK_SH)

    @record
    def work() -> None:
        result = call()
        try:
            content = pickle.dumps(result)
        except Exception as error:
            raise UnpicklableResult(
                f"its return value, of type {type(result).__qualname__}, can't be pickled ({error}): return "
                "plain data"
            ) from error
        path = folder / f"{os.environ['RALLYPOINT_ROUND']}.{os.environ['RANK']}"
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)

    work()
    fcntl.flock(running, fcntl.LOCK_EX)
    fcntl.flock(running, fcntl.LOCK_UN)  # child processes that stay may have inherited it


def exit_successfully() -> NoReturn:
    """Exit as the interpreter does, without its finalisation, which can abort a worker that has succeeded.

    Finalisation destroys objects while threads of native code run. Without destroy_process_group(), a thread of gloo
    may then release a tensor, for which it needs the interpreter: Python ends such a thread by pthread_exit, inside C++
    code that must not unwind, so std::terminate ends the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader is gone
            stream.flush()
    os._exit(0)


def load_results(folder: Path, ranks: Sequence[int]) -> dict[int, Any]:
    """Return the results of these global ranks in the last round; None for a worker that did not return.

    Raises:
        CallError: A result can't be unpickled in this process.
    """
    found = [path for path in folder.glob("*.*") if path.suffix != ".tmp"]
    last = max((int(path.stem) for path in found), default=0)
    results: dict[int, Any] = dict.fromkeys(ranks)
    for rank in ranks:
        path = folder / f"{last}.{rank}"
        if path in found:
            try:
                # Classes of the workers' main module belong to __mp_main__. Importing multiprocessing has made that a
                # name of __main__ here.
                results[rank] = pickle.loads(path.read_bytes())  # noqa: S301
            except Exception as error:
                raise CallError(
                    f"the return value of rank {rank} can't be loaded here ({type(error).__name__}: {error}): return "
                    "plain data, or objects of a module that both sides import"
                ) from error
    return results


class _ForkedCall(process.BaseProcess):
    _start_method = None  # start method of its own children: the default


def run_forked(call: Callable[[], object], folder: Path) -> int:
    """Run the worker in a fork that looks like a fresh process to the kernel.

    Returns:
        The exit code.
    """
    renew_streams()
    renew_signals()
    worker = _ForkedCall(target=run_call, args=(call, folder), name=f"rank {os.environ['RANK']}")
    # As multiprocessing in its children: forget the parent's children, run, wait for threads and child processes,
    # flush.
    return int(worker._bootstrap())  # type: ignore[attr-defined]


def renew_streams() -> None:
    """Replace the standard streams of this fork by unbuffered ones.

    The inherited objects are the parent's: a notebook's, or with unprinted output of the parent.
    """
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def renew_signals() -> None:
    """Give this fork the signal handlers of a fresh interpreter; an ignored SIGHUP (nohup) stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        with contextlib.suppress(OSError, ValueError):  # signals reserved by the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


_MAIN = {"init_main_from_name", "init_main_from_path"}


def _preparation() -> Mapping[str, Any]:
    """Return the data for multiprocessing.spawn.prepare that is available without touching multiprocessing's state."""
    preparation: dict[str, Any] = {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "sys_argv": list(sys.argv),
        "orig_dir": os.getcwd(),
    }
    main = sys.modules.get("__main__")
    specification = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if specification is not None:
        if not specification.name.endswith("__main__"):  # such a module runs the program when imported
            preparation["init_main_from_name"] = specification.name
    elif path is not None and os.path.isfile(path):  # a program from standard input has "<stdin>"
        preparation["init_main_from_path"] = os.path.abspath(path)
    return preparation


if __name__ == "__main__":
    from rallypoint.worker import call as this  # the loaded program may import it too: one module object

    given = Path(sys.argv[1])

    def load_and_call() -> object:
        return this.load_call(given)()

    this.run_call(load_and_call, given)
    this.exit_successfully()
