"""A worker that waits until the test releases FOLDER/lock, and then succeeds: patient_worker.py FOLDER."""

from __future__ import annotations

import fcntl
import sys

with open(f"{sys.argv[1]}/lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_SH)
