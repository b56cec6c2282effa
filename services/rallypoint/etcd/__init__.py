"""A client of etcd's v3 API: several endpoints, sessions that detect their loss, watches that resume."""

# Sets environment variables that gRPC reads when it is first imported, which modules of this package do.
import rallypoint.serving  # noqa: F401
