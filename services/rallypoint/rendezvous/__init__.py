"""Rendezvous: membership of runs in rounds, and the key-value store of their workers."""

# Sets what gRPC reads when it is first imported, which modules of this package do.
import rallypoint.serving  # noqa: F401
