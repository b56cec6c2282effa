"""The common parts of every gRPC server of Rallypoint."""

from __future__ import annotations

import os

# gRPC reads both when it is first imported, so they are set before any module of this package can import it.
#
# Its fork handlers are on by default, and crash forked children with SIGSEGV while a channel or a server is alive.
# No process that uses gRPC here forks; workers are started by a spawner without it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its C++ core writes free text directly to stderr, between the JSON lines of our own log. Its errors reach us as
# status codes; GRPC_VERBOSITY=ERROR (or DEBUG) in the environment brings the text back.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
