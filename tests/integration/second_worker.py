"""A worker that ends at once, or hangs in `expires` for a while and then ends normally: FOLDER [SECONDS]."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rallypoint.timer import expires

(Path(sys.argv[1]) / "started").touch()
with expires(after=0.5, scope="step"):
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
