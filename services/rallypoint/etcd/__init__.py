"""A client of etcd's v3 API: several endpoints, sessions that know when they are lost, watches that resume."""

# Sets what gRPC reads when it is first imported, which modules of this package do.
import rallypoint.serving  # noqa: F401
