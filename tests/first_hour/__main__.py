"""`python -m first_hour`: play the first hour, and write docs/first-hour.md."""

from __future__ import annotations

import asyncio
import sys

from first_hour.page import PAGE
from first_hour.scenes import play
from first_hour.terminals import why_not

if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    PAGE.write_text(asyncio.run(play()), encoding="utf-8")
