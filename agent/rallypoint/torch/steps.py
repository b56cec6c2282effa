"""The steps of a training loop, for the callbacks of frameworks; imports none of them."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed

from rallypoint.timer import configure, expires, progress
from rallypoint.timer.worker.expires import Guard
from rallypoint.timer.worker.process import SOCKET_VARIABLE
from rallypoint.worker import checkpoint_saved, should_checkpoint


class Steps:
    """Guards steps, reports them, and finds out when all ranks must save their state."""

    def __init__(self, after: float | Literal["auto"] | None, every: int) -> None:
        """Start before the first step.

        Args:
            after: timeout of a step in seconds; "auto": learned; None: steps are not guarded.
            every: steps between two agreements of the ranks, at least 1.

        Raises:
            ValueError: an argument is out of range.
        """
        if every < 1:
            raise ValueError(f"every_n_steps is {every}; expected at least 1")
        if not os.environ.get(SOCKET_VARIABLE):
            # Without an agent, steps are neither guarded nor reported: the program may run alone.
            configure(required=False)
        self._after = after
        self._every = every
        self._guard: Guard | None = None
        if after is not None:
            expires(after, scope="step")  # raises if it is out of range

    def begin(self) -> None:
        """Begin a step."""
        self.leave()
        if self._after is not None:
            self._guard = expires(self._after, scope="step")
            self._guard.__enter__()

    def end(self, step: int, device: torch.device) -> bool:
        """End a step. Return True if all ranks must save their state now, because a host will leave.

        All ranks must call it for the same steps: every `every` steps they agree, by a reduction on `device`.
        """
        self.leave()
        progress(step)
        if step % self._every:
            return False
        if not torch.distributed.is_initialized():
            return should_checkpoint()
        wanted = torch.tensor(int(should_checkpoint()), device=device)
        torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
        return bool(wanted.item())

    def leave(self) -> None:
        """Leave the present step, if any; also after an exception."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(None, None, None)

    def saved(self) -> None:
        """Report that all ranks have saved their state; all of them must call it. Without an announcement: nothing."""
        if torch.distributed.is_initialized():
            # Otherwise a host could leave while the rank that writes the checkpoint, on another one, has not ended.
            torch.distributed.barrier()
        checkpoint_saved()
