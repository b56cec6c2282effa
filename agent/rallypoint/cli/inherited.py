"""The environment as it was when the command was started.

Importing gRPC's chassis sets variables that tame gRPC in this process; workers must not inherit them.
"""

from __future__ import annotations

import os

ENVIRONMENT = dict(os.environ)
