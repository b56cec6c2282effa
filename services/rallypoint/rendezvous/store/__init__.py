"""The key-value store of a run: spaces of runs and rounds, durable before anyone is told."""

# Sets what gRPC reads when it is first imported, and so comes before any module here that imports gRPC.
import rallypoint.serving  # noqa: F401
