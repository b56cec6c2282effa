"""The kernel's data on a process that hangs are read without its help, and described in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from agent.hung_process import STACK_SIGNAL, hung
from rallypoint.agent.hangs.kernel_stacks import (
    MOST_THREADS,
    ProcessLook,
    Thread,
    caught_signals,
    inspect_process,
    render_threads,
)
from support.waiting import wait_until


def look(pid: int) -> ProcessLook:
    """Inspect a process that exists."""
    found = inspect_process(pid)
    assert found is not None
    return found


def when(pid: int, condition: Callable[[ProcessLook], bool]) -> ProcessLook:
    """Inspect a process once the condition holds."""
    wait_until(lambda: condition(look(pid)), "the process to be so")
    return look(pid)


def test_a_waiting_thread_has_the_reason() -> None:
    """State, wait channel and system call agree for a process that sleeps."""
    with hung(None, "gil") as pid:
        main = when(pid, lambda look: "nanosleep" in look.main.call).main
        assert (main.tid, main.state, main.name) == (pid, "S", os.path.basename(sys.executable)[:15])
        assert main.state_in_words == "sleeping"
        assert main.meaning == "sleeps for a time it chose"


def test_a_stopped_process_is_recognized() -> None:
    """It waits for no resource: a signal has stopped it."""
    with hung(None, "stopped") as pid:
        stopped = when(pid, lambda look: look.stopped)
        assert (stopped.main.state_in_words, stopped.main.meaning) == ("stopped by a signal", "")
        assert stopped.stuck is None


def test_processor_time_is_that_of_all_threads_and_of_each() -> None:
    """The state of a waiting main thread does not describe the process."""
    with hung(None, "pool") as pid:
        busy = when(pid, lambda look: len(look.threads) == 2 and look.threads[1].cpu_seconds > 0.2)
        assert busy.cpu_seconds >= busy.threads[1].cpu_seconds > busy.main.cpu_seconds
        assert busy.main.state == "S"


def test_the_file_that_a_system_call_is_on_is_named() -> None:
    """It shows the file system, or the peer, that does not answer."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        call = when(cat.pid, lambda look: look.main.call.startswith("read")).main.call
        assert cat.stdin is not None
        assert call == f"read of {os.readlink(f'/proc/self/fd/{cat.stdin.fileno()}')} (descriptor 0)"


def test_only_signals_with_a_handler_are_caught() -> None:
    """Any other signal could kill the process."""
    with hung(None, "silent") as pid:
        caught = caught_signals(pid)
        assert STACK_SIGNAL in caught
        assert signal.SIGINT in caught  # Python's own
        assert not caught & {signal.SIGUSR1, signal.SIGTERM, signal.SIGABRT}


def test_an_ended_process_is_no_error() -> None:
    """A process may end at any moment; that is no error."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert inspect_process(process.pid) is None
        assert caught_signals(process.pid) == frozenset()


def test_of_many_threads_the_first_are_looked_at() -> None:
    """A trainer has hundreds; the text has the number of those left out."""
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


def test_a_paragraph_has_all_known_data_of_a_thread() -> None:
    """It is written for people; numbers have units."""
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
        (
            "folio_wait_bit_common",
            ("folio_wait_bit_common", "nfs_file_read"),
            "",
            "waits for a network file system (NFS)",
        ),
        ("ll_file_io_generic", (), "", "waits for a network file system"),
        ("", (), "futex", "waits for a lock or another thread"),
        ("", (), "read of /data/nfs/mutex_ib_ (descriptor 3)", ""),
        ("never_heard_of", (), "", ""),
    ],
)
def test_wait_channels_are_put_into_words(
    channel: str, stack: tuple[str, ...], call: str, meaning: str
) -> None:
    """The channel is the best source, then the kernel's stack, then the call; an unknown one is not explained."""
    thread = Thread(1, "x", "S", channel, call, stack)
    assert thread.meaning.startswith(meaning)
    assert bool(thread.meaning) == bool(meaning)


# Wait channels and stacks of idle processes in Linux 6.18, and their meanings.
IDLE = [
    ("hrtimer_nanosleep", "common_nsleep_timens __x64_sys_clock_nanosleep", "sleeps for a time it chose"),
    ("do_epoll_wait", "__x64_sys_epoll_wait", "waits for connections or files to be ready"),
    ("ep_poll", "do_epoll_wait", "waits for connections or files to be ready"),
    ("poll_schedule_timeout.constprop.0", "do_sys_poll", "waits for connections or files to be ready"),
    (
        "poll_schedule_timeout.constprop.0",
        "do_select core_sys_select",
        "waits for connections or files to be ready",
    ),
    ("io_cqring_wait", "__do_sys_io_uring_enter", ""),
    ("futex_do_wait", "__futex_wait futex_wait do_futex", "waits for a lock or another thread"),
    ("anon_pipe_read", "vfs_read ksys_read", "waits for the other end of a pipe"),
    ("wait_for_partner", "fifo_open do_dentry_open", "waits for the other end of a pipe"),
    ("inet_csk_accept", "inet_accept do_accept", "waits for the other end of a connection"),
    ("wait_woken", "sk_wait_data tcp_recvmsg_locked", "waits for the other end of a connection"),
    ("mptcp_recvmsg", "inet_recvmsg", "waits for the other end of a connection"),
    ("__skb_wait_for_more_packets", "__skb_recv_udp", "waits for the other end of a connection"),
    ("unix_stream_read_generic", "unix_stream_recvmsg", "waits for the other end of a connection"),
    ("do_wait", "kernel_wait4", "waits for a child process"),
    ("__do_sys_pause", "", "waits for a signal"),
    ("do_sigtimedwait.isra.0", "__x64_sys_rt_sigtimedwait", "waits for a signal"),
    ("do_wait_intr_irq", "eventfd_read vfs_read", ""),
    ("do_wait_intr_irq", "timerfd_read_iter vfs_read", ""),
    ("signalfd_read_iter", "vfs_read ksys_read", ""),
    ("wait_woken", "inotify_read vfs_read", ""),
    ("wait_woken", "n_tty_read tty_read", "waits for a terminal"),
    ("locks_lock_inode_wait", "__do_sys_flock", "waits for a file that another process has locked"),
    ("__do_semtimedop", "do_semtimedop", ""),
    ("do_msgrcv", "", ""),
    ("wq_sleep", "do_mq_timedreceive", ""),
    ("fuse_dev_do_read.constprop.0", "fuse_dev_read vfs_read", ""),
    ("usb_shutdown_wait", "usbdev_ioctl", ""),
]


@pytest.mark.parametrize(("channel", "stack", "meaning"), IDLE)
def test_an_idle_process_waits_for_nothing_that_could_be_broken(
    channel: str, stack: str, meaning: str
) -> None:
    """This holds with and without the frames of the system call itself, which are below all of them."""
    for frames in (stack.split(), [*stack.split(), "do_syscall_64", "entry_SYSCALL_64_after_hwframe"]):
        assert Thread(1, "x", "S", channel, "", (channel, *frames)).meaning == meaning


IDLE_PROGRAMS = {
    "import time; time.sleep(100)": "sleeps for a time it chose",
    "import asyncio; asyncio.run(asyncio.sleep(100))": "waits for connections or files to be ready",
    "import select; select.poll().poll()": "waits for connections or files to be ready",
    "import select; select.select([], [], [])": "waits for connections or files to be ready",
    "import threading; threading.Event().wait()": "waits for a lock or another thread",
    "import os; os.read(os.pipe()[0], 1)": "waits for the other end of a pipe",
    "import socket; socket.create_server(('127.0.0.1', 0)).accept()": "waits for the other end of a connection",
    "import socket; ends = socket.socketpair(); ends[0].recv(1)": "waits for the other end of a connection",
    "import os, time; os.waitpid(os.fork() or time.sleep(100), 0)": "waits for a child process",
    "import signal; signal.pause()": "waits for a signal",
    "import signal; signal.sigwait([signal.SIGUSR1])": "waits for a signal",
    "import os; os.read(os.eventfd(0), 8)": "",
    "import ctypes, os; os.read(ctypes.CDLL(None).inotify_init(), 100)": "",
}


@pytest.mark.parametrize("program", IDLE_PROGRAMS)
def test_idle_processes_of_this_kernel_have_no_wrong_meaning(program: str) -> None:
    """A kernel may show nothing, or an unknown name: then there is no meaning, and never a wrong one."""
    with subprocess.Popen(
        [sys.executable, "-Sc", f"print('ready', flush=True)\n{program}"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            seen = when(process.pid, lambda look: look.main.state == "S")
            assert seen.main.meaning in (IDLE_PROGRAMS[program], "")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_thread_that_no_signal_ends_is_found() -> None:
    """It may be any thread: the process can't die before it wakes up."""
    sleeping = Thread(1, "main", "S")
    assert ProcessLook(1, 0.0, (sleeping, FROZEN), 2).stuck is FROZEN
    assert ProcessLook(1, 0.0, (sleeping,), 1).stuck is None
