"""For PyTorch programs: code written for torch.distributed.elastic runs here unchanged.

Only the modules of this package import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from rallypoint.torch.handler import RallypointRendezvousHandler


def rendezvous_handler() -> Callable[[RendezvousParameters], RallypointRendezvousHandler]:
    """Return the creator of the backend `rallypoint`: the entry point of the group `torchrun.handlers`.

    Every torchrun calls this while torch is being imported, with any backend: nothing is imported here.
    """
    return _create


def _create(parameters: RendezvousParameters) -> RallypointRendezvousHandler:
    from rallypoint.torch.handler import RallypointRendezvousHandler  # noqa: PLC0415

    return RallypointRendezvousHandler(parameters)
