"""The terminal of this process, lent to one worker through a pseudo-terminal.

    terminal ── agent ── pseudo-terminal ── worker
        └─ console ── log file ─┘

The worker does not get the terminal itself, for these reasons: the report of a failure quotes the log file; a worker
is in a session of its own, so the kernel would let it read the terminal while a shell does; and when a worker is
killed, the settings that it made, such as no echo, stay with the pseudo-terminal. Both output streams are one device,
and so one file: a progress bar on stderr between prints on stdout needs their order.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import termios
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from rallypoint.agent.logs.follower import CHUNK, OutputThread
from rallypoint.agent.logs.lines import line_prefix
from rallypoint.agent.logs.streams import LogError, OutputOptions, Streams
from rallypoint.rpc.logs import get_logger

_DESCRIPTORS = {Streams.STDOUT: 1, Streams.STDERR: 2}
_INPUT_MODE, _OUTPUT_MODE, _LOCAL_MODE, _CHARACTERS = 0, 1, 3, 6  # of the list that termios.tcgetattr returns
_SIGNAL_KEYS = {termios.VINTR: signal.SIGINT, termios.VQUIT: signal.SIGQUIT, termios.VSUSP: signal.SIGTSTP}
_MOST_TYPED = 64 * 1024  # bytes that the worker has not taken; with more, the terminal is not read

_log = get_logger("rallypoint.agent")


def open_terminal(options: OutputOptions) -> Terminal | None:
    """Open a pseudo-terminal for the worker that gets this process's terminal; None: there is none for it.

    Raises:
        LogError: The system has no pseudo-terminal left.
    """
    rank = options.input_rank
    shown = [stream for stream in _DESCRIPTORS if rank is not None and _is_shown(options, rank, stream)]
    if rank is None or not shown or not (options.tty or os.isatty(0)):
        return None
    streams = reduce(Streams.__or__, shown) if options.tty else Streams.NONE
    try:
        return Terminal(rank, streams, shown[0])
    except OSError as error:
        raise LogError(f"cannot open a pseudo-terminal: {error.strerror}") from error


def _is_shown(options: OutputOptions, local_rank: int, stream: Streams) -> bool:
    """True if the terminal shows a stream of a worker without a prefix."""
    ranks = options.local_ranks_filter
    altered = options.redirects.of(local_rank) | options.tee.of(local_rank)
    return (
        os.isatty(_DESCRIPTORS[stream]) and stream not in altered and (ranks is None or local_rank in ranks)
    )


def environment_of_viewed(
    options: OutputOptions, local_rank: int, rank: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return variables for a worker whose standard output is a file that a terminal shows: it may use colour.

    A variable that is `given` stays as it is.
    """
    ranks, teed = options.local_ranks_filter, Streams.STDOUT in options.tee.of(local_rank)
    hidden = Streams.STDOUT in options.redirects.of(local_rank) and not teed
    if (
        options.input_rank is None
        or hidden
        or (ranks is not None and local_rank not in ranks)
        or not os.isatty(1)
    ):
        return {}
    prefix = (
        line_prefix(options.line_prefix, role=options.role, local_rank=local_rank, rank=rank) if teed else b""
    )
    columns = os.get_terminal_size(1).columns - len(prefix)
    found = {"COLUMNS": str(columns)} if columns > 0 else {}
    if "NO_COLOR" not in given and given.get("TERM", "dumb") != "dumb":
        # The latter: rich would animate progress bars of several workers over one another.
        found |= {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}
    return {name: value for name, value in found.items() if name not in given}


class Terminal:
    """A pseudo-terminal for the workers of one local rank, one after the other, and its connection to the terminal.

    While a worker runs, the terminal delivers single keys, and the pseudo-terminal echoes and edits as the worker
    wants. Keys are read only while this process is in the foreground. The keys for signals act on this process, as
    they would without a pseudo-terminal, unless the worker edits its own line, as in breakpoint(): then they are the
    worker's.

    Attributes:
        local_rank: Of the workers.
        streams: Their output streams that are the pseudo-terminal.
        log_stream: The stream whose log file gets the output, echo included.
        path: Of the pseudo-terminal.
        reads: True if it is their standard input too.
    """

    def __init__(self, local_rank: int, streams: Streams, log_stream: Streams) -> None:
        """`log_stream`: One that the terminal shows. Raises OSError."""
        self.local_rank, self.streams, self.log_stream = local_rank, streams, log_stream
        self.reads = os.isatty(0)
        self._terminal = 0 if self.reads else _DESCRIPTORS[log_stream]
        self._master, self._slave = os.openpty()
        os.set_blocking(self._master, False)
        self.path = Path(os.ttyname(self._slave))
        self._initial = termios.tcgetattr(self._terminal if self._in_foreground() else self._slave)
        # The file gets the bytes as they were written; the terminal itself turns \n into \r\n.
        self._initial[_OUTPUT_MODE] &= ~termios.OPOST
        self._before: list[Any] | None = None  # settings of the terminal, while it delivers keys
        self._stopping = False
        self._typed = bytearray()
        self._keys = select.epoll()
        if self.reads:
            # Edge-triggered: what is typed while a shell is in the foreground stays there, unread.
            self._keys.register(0, select.EPOLLIN | select.EPOLLET)
        self._handlers = {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTTIN, signal.SIGTTOU)
        }
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGWINCH, self._resize)
        self._loop.add_signal_handler(signal.SIGCONT, self._take)
        self._lock = asyncio.Lock()
        self._copying: asyncio.Task[None] | None = None
        self._log_file = -1
        self._output: OutputThread

    def begin(self, log: Path) -> None:
        """Connect the next worker, which is about to start, and its log, a file or a pipe. Raises OSError."""
        self._log_file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._output = OutputThread(self._log_file)
        termios.tcsetattr(self._slave, termios.TCSANOW, self._initial)
        self._resize()
        self._stopping = False
        self._copying = asyncio.create_task(self._copy(), name="copy the pseudo-terminal")
        if self.reads:
            self._loop.add_reader(self._keys.fileno(), self._read_keys)
            self._take()
            self._read_keys()  # typed before

    def stopping(self) -> None:
        """Note that the worker is being stopped: from now on, Ctrl-C is this process's in any case."""
        self._stopping = True

    @property
    def one_file(self) -> int | None:
        """Local rank of the workers, if both their output streams are the pseudo-terminal; otherwise None."""
        return self.local_rank if self.streams is Streams.BOTH else None

    @property
    def complete(self) -> bool:
        """True if no output was dropped so far."""
        return self._output.error is None

    async def flush(self) -> None:
        """Return when all present output is in the log file."""
        async with self._lock:
            while data := self._read_output():
                was_complete = self.complete
                await self._output.write(data)
                if was_complete and self._output.error is not None:
                    reason = self._output.error.strerror
                    _log.error("output of a worker can't be written, and is dropped", reason=reason)

    async def finish(self, timeout: float) -> None:
        """Copy the rest and release the terminal, after the worker's end. Takes at most about `timeout` seconds."""
        if self._copying is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.flush()
        self._copying.cancel()
        await asyncio.wait([self._copying])
        self._copying = None
        await self._output.close(timeout)
        os.close(self._log_file)
        self._release()

    def close(self) -> None:
        """Close the pseudo-terminal."""
        self._release()
        for number in (signal.SIGWINCH, signal.SIGCONT):
            self._loop.remove_signal_handler(number)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._keys.close()
        os.close(self._master)
        os.close(self._slave)

    # -- the terminal

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:
            return True  # it is not this session's: there is no job control

    def _take(self) -> bool:
        """Make the terminal deliver keys, again if a shell has changed that; false in the background."""
        if self._copying is None or not self.reads or not self._in_foreground():
            return False
        if self._before is None:
            self._before = termios.tcgetattr(0)
        mode = [*self._before]
        mode[_INPUT_MODE] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP)
        mode[_LOCAL_MODE] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
        mode[_CHARACTERS] = [*mode[_CHARACTERS]]
        mode[_CHARACTERS][termios.VMIN], mode[_CHARACTERS][termios.VTIME] = 1, 0
        termios.tcsetattr(0, termios.TCSANOW, mode)
        return True

    def _release(self) -> None:
        self._loop.remove_reader(self._keys.fileno())
        if self._before is not None and self._in_foreground():
            termios.tcsetattr(0, termios.TCSANOW, self._before)
        self._before = None

    def _resize(self) -> None:
        termios.tcsetwinsize(self._master, termios.tcgetwinsize(self._terminal))

    # -- keys

    def _read_keys(self) -> None:
        self._keys.poll(0)
        waiting = select.poll()
        waiting.register(0, select.POLLIN)
        # In the background a shell, or another program, is to have them.
        while len(self._typed) < _MOST_TYPED and self._take() and waiting.poll(0):
            try:
                data = os.read(0, 4096)
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._keys.fileno())  # the terminal is gone; SIGHUP reports that
                return
            self._press(data)

    def _press(self, keys: bytes) -> None:
        """Carry out keys for signals, and pass the others on."""
        worker = termios.tcgetattr(self._slave)[_LOCAL_MODE]
        if self._before is not None and (
            self._stopping or (worker & termios.ICANON and worker & termios.ISIG)
        ):
            characters = self._before[_CHARACTERS]
            signals = {
                characters[at]: number for at, number in _SIGNAL_KEYS.items() if characters[at] != b"\0"
            }
            begin = 0
            for at in range(len(keys)):
                if (number := signals.get(keys[at : at + 1])) is not None:
                    self._type(keys[begin:at])
                    self._send(number)
                    begin = at + 1
            keys = keys[begin:]
        self._type(keys)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to this process's group, as the terminal would."""
        if number == signal.SIGTSTP and self._before is not None:
            termios.tcsetattr(0, termios.TCSANOW, self._before)
        os.killpg(0, number)
        self._take()  # continued

    def _type(self, keys: bytes) -> None:
        self._typed += keys
        with suppress(BlockingIOError):
            while self._typed:
                del self._typed[: os.write(self._master, self._typed)]
        if self._typed:
            self._loop.add_writer(self._master, self._type_more)

    def _type_more(self) -> None:
        self._loop.remove_writer(self._master)
        self._type(b"")
        self._read_keys()

    # -- output

    async def _copy(self) -> None:
        while True:
            ready = asyncio.Event()
            self._loop.add_reader(self._master, ready.set)
            try:
                await ready.wait()
            finally:
                self._loop.remove_reader(self._master)
            await self.flush()

    def _read_output(self) -> bytes:
        data = b""
        with suppress(BlockingIOError):
            while len(data) < CHUNK:
                data += os.read(self._master, CHUNK)
        return data
