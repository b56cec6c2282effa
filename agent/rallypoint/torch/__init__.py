"""For PyTorch programs: code written for torch.distributed.elastic runs here unchanged.

Only the modules of this package import torch.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from rallypoint.torch.handler import RallypointRendezvousHandler


def rendezvous_handler() -> Callable[[RendezvousParameters], RallypointRendezvousHandler]:
    """Return the creator of the backend `rallypoint`: the entry point of the group `torchrun.handlers`.

    Every torchrun calls this while torch is being imported, with any backend: nothing slow is imported here.
    """
    # torch 2.13 has no entry point for event handlers. Another version may have no such table, or import it later.
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.elastic.events import handlers  # noqa: PLC0415

        handlers._log_handlers.setdefault("rallypoint", _EventHandler())
    return _create


def _create(parameters: RendezvousParameters) -> RallypointRendezvousHandler:
    from rallypoint.torch.handler import RallypointRendezvousHandler  # noqa: PLC0415

    return RallypointRendezvousHandler(parameters)


class _EventHandler(logging.Handler):
    """`torchrun --event-log-handler rallypoint`."""

    def emit(self, record: logging.LogRecord) -> None:
        from rallypoint.torch.events import record_event  # noqa: PLC0415

        record_event(record.getMessage())
