"""What the kernel says of a process that hangs is read without its help, and put into words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from agent.hung_process import STACK_SIGNAL, hung
from process_probe import wait_until
from rallypoint.agent.native_stacks import (
    MOST_THREADS,
    ProcessLook,
    Thread,
    caught_signals,
    look_at,
    render_threads,
)


def look(pid: int) -> ProcessLook:
    """A look at a process that is there."""
    found = look_at(pid)
    assert found is not None
    return found


def when(pid: int, condition: Callable[[ProcessLook], bool]) -> ProcessLook:
    """A look at a process once it is so."""
    wait_until(lambda: condition(look(pid)), "the process to be so")
    return look(pid)


def test_a_thread_that_waits_says_for_what() -> None:
    """State, wait channel and system call agree about a process that sleeps."""
    with hung(None, "gil") as pid:
        main = when(pid, lambda look: "nanosleep" in look.main.call).main
        assert (main.tid, main.state, main.name) == (pid, "S", os.path.basename(sys.executable)[:15])
        assert main.state_in_words == "sleeping"
        assert main.meaning == "sleeps for a time it chose"


def test_a_stopped_process_is_told_apart() -> None:
    """It waits for nothing: somebody has stopped it."""
    with hung(None, "stopped") as pid:
        stopped = when(pid, lambda look: look.stopped)
        assert (stopped.main.state_in_words, stopped.main.meaning) == ("stopped by a signal", "")
        assert stopped.stuck is None


def test_processor_time_is_that_of_all_threads_and_of_each() -> None:
    """A main thread that waits tells nothing of the process."""
    with hung(None, "pool") as pid:
        busy = when(pid, lambda look: len(look.threads) == 2 and look.threads[1].cpu_seconds > 0.2)
        assert busy.cpu_seconds >= busy.threads[1].cpu_seconds > busy.main.cpu_seconds
        assert busy.main.state == "S"


def test_the_file_that_a_system_call_is_on_is_named() -> None:
    """That is the file system, or the peer, that does not answer."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        call = when(cat.pid, lambda look: look.main.call.startswith("read")).main.call
        assert cat.stdin is not None
        assert call == f"read of {os.readlink(f'/proc/self/fd/{cat.stdin.fileno()}')} (descriptor 0)"


def test_only_signals_with_a_handler_are_caught() -> None:
    """Any other would do its worst to the process."""
    with hung(None, "silent") as pid:
        caught = caught_signals(pid)
        assert STACK_SIGNAL in caught
        assert signal.SIGINT in caught  # Python's own
        assert not caught & {signal.SIGUSR1, signal.SIGTERM, signal.SIGABRT}


def test_nobody_is_there_to_be_looked_at() -> None:
    """A process may be gone at any moment; that is no error."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert look_at(process.pid) is None
        assert caught_signals(process.pid) == frozenset()


def test_of_many_threads_the_first_are_looked_at() -> None:
    """A trainer has hundreds; the text says how many were left out."""
    program = f"""if True:
        import threading
        for _ in range({MOST_THREADS + 9}):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("ready", flush=True)
        threading.Event().wait()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            seen = look(process.pid)
            assert (len(seen.threads), seen.thread_count) == (MOST_THREADS, MOST_THREADS + 10)
            text = render_threads(seen)
            assert text.startswith(f"main thread {process.pid} (")
            assert text.endswith("... and 10 more threads")
        finally:
            process.kill()


FROZEN = Thread(
    tid=7,
    name="trainer",
    state="D",
    wait_channel="percpu_rwsem_wait",
    call="write of /mnt/data/x (descriptor 3)",
    kernel_stack=("percpu_rwsem_wait+0x1/0x2", "vfs_write+0x3/0x4"),
    cpu_seconds=1.5,
)


def test_a_paragraph_says_all_that_is_known_of_a_thread() -> None:
    """For people; numbers have units."""
    assert render_threads(ProcessLook(7, 1.5, (FROZEN,), 1)) == (
        "main thread 7 (trainer): in uninterruptible sleep in percpu_rwsem_wait: waits for a frozen file system, or "
        "another lock of the kernel; system call: write of /mnt/data/x (descriptor 3); 1.50 s of processor time since "
        "it began\n    percpu_rwsem_wait+0x1/0x2\n    vfs_write+0x3/0x4"
    )


@pytest.mark.parametrize(
    ("channel", "stack", "call", "meaning"),
    [
        ("futex_do_wait", (), "", "waits for a lock or another thread"),
        ("", ("folio_wait_bit_common+0x1", "filemap_fault"), "", "waits for a disk"),
        ("rpc_wait_bit_killable", (), "", "waits for a network file system (NFS)"),
        (
            "request_wait_answer",
            ("request_wait_answer", "fuse_simple_request"),
            "",
            "waits for a file system in user ",
        ),
        ("", (), "futex", "waits for a lock or another thread"),
        ("never_heard_of", (), "", ""),
    ],
)
def test_wait_channels_are_put_into_words(
    channel: str, stack: tuple[str, ...], call: str, meaning: str
) -> None:
    """The channel says it best, else the kernel's stack, else the call; what nobody knows is left to the reader."""
    thread = Thread(1, "x", "S", channel, call, stack)
    assert thread.meaning.startswith(meaning)
    assert bool(thread.meaning) == bool(meaning)


def test_the_thread_that_no_signal_ends_is_found() -> None:
    """Whichever it is: the process can't die before it wakes up."""
    sleeping = Thread(1, "main", "S")
    assert ProcessLook(1, 0.0, (sleeping, FROZEN), 2).stuck is FROZEN
    assert ProcessLook(1, 0.0, (sleeping,), 1).stuck is None
