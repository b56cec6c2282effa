"""A worker that binds MASTER_PORT late, as after imports that take seconds; before that it takes all ports that the
kernel assigns, like another program of the host."""

from __future__ import annotations

import os
import socket
import sys

taken: list[socket.socket] = []
while True:
    thief = socket.socket()
    try:
        thief.bind(("", 0))
        thief.listen()
    except OSError:
        break
    taken.append(thief)
meeting = socket.socket()
meeting.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
meeting.listen()
sys.stdout.write(f"bound after {len(taken)} were taken\n")
