"""Pass a program's signals to the agent that works for it, and apply them to the program afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class PassedSignals:
    """A context in which signals are passed to an agent; the former handlers are restored at its end.

    Only the main thread can set handlers: in another thread this does nothing, and the program's own handlers must act.
    Signals that this program ignores, and SIGUSR1 and SIGUSR2 if it handles them, are not passed on.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers`: signals on which the job leaves its run; SIGUSR1 and SIGUSR2 are added."""
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._received: list[int] = []
        self._send: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in dict.fromkeys((*self._numbers, *USER_SIGNALS)):
                handler = signal.getsignal(number)
                if handler is None or handler == signal.SIG_IGN:  # None: set by a C library
                    continue
                if number in self._numbers or handler == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def send_by(self, send: Callable[[int], None]) -> None:
        """Pass signals to `send` from now on, first those that were received already."""
        self._send = send
        for number in list(self._received):
            send(number)

    def take_effect(self) -> None:
        """Apply the first ending signal to this program; its handlers must be restored.

        Raises:
            KeyboardInterrupt: The signal was Ctrl-C.
            SystemExit: It was another signal, for which this program has no handler.
        """
        for number in self._received:
            if number not in self._numbers:
                continue
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            if self._before[number] == signal.SIG_DFL:
                raise SystemExit(128 + number)
            signal.raise_signal(number)
            return

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        if self._send is not None:
            self._send(number)
