"""What runs inside a worker process: imports no gRPC and no protobuf, starts fast, may be forked."""

from rallypoint.worker.record import record
from rallypoint.worker.store import Store

__all__ = ["Store", "record"]
