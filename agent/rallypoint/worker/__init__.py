"""Library for worker processes: imports no gRPC and no protobuf, starts fast, may be forked."""

from rallypoint.worker.notice import Notice, checkpoint_saved, notice, should_checkpoint
from rallypoint.worker.record import record
from rallypoint.worker.store import Store
from rallypoint.worker.unrecoverable import Unrecoverable

__all__ = ["Notice", "Store", "Unrecoverable", "checkpoint_saved", "notice", "record", "should_checkpoint"]
