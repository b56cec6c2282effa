"""Rendezvous: membership of runs in rounds, and the key-value store of their workers."""

# Sets variables that gRPC reads at its first import, which modules of this package do.
import rallypoint.serving  # noqa: F401
