"""The chassis every gRPC service of Rallypoint stands on."""

from __future__ import annotations

import os

# gRPC reads both when it is first imported, so they are set before any module of this package can do that.
#
# Its fork handlers are on unless told otherwise, and with a channel or a server alive they take forked
# children down with SIGSEGV. Nothing that speaks gRPC here forks; workers are started by a spawner without it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its C++ core writes free text straight to stderr, between the JSON lines of our own log. What matters of it
# reaches us as status codes; GRPC_VERBOSITY=ERROR (or DEBUG) in the environment brings the text back.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
