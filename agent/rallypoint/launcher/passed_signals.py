"""While an agent works for it, a program's signals are the agent's; what they mean to the program comes after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class PassedSignals:
    """A context in which signals are passed on; the handlers from before are back at its end.

    Only the main thread can have handlers: in another one nothing happens, and the program's own handlers are to see
    to what is to be done. Signals that this program ignores, and user's signals that it handles, stay its own.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers`: signals that have the job leave its run; the user's are added."""
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._received: list[int] = []
        self._send: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in dict.fromkeys((*self._numbers, *USER_SIGNALS)):
                handler = signal.getsignal(number)
                if handler is None or handler == signal.SIG_IGN:  # None: of some library in C
                    continue
                if number in self._numbers or handler == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def send_by(self, send: Callable[[int], None]) -> None:
        """From now on signals go there, and those first that have come already."""
        self._send = send
        for number in list(self._received):
            send(number)

    def take_effect(self) -> None:
        """Does what the first signal that ends things means to this program, once its handlers are back.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was another one, for which this program has no handler.
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
