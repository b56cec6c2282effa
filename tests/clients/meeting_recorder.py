"""A worker that meets the others of its round at the master's address and port, writes a record, and waits.

Its arguments: a folder. It appends to `<node>.jsonl` there, and ends once there is a file `finish`.
"""

import json
import os
import pathlib
import socket
import sys
import time

folder = pathlib.Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

if rank == 0:
    with socket.create_server(("", port)) as server:
        others = [server.accept()[0].makefile("rw") for _ in range(size - 1)]
        ranks = sorted([rank, *(int(other.readline()) for other in others)])
        for other in others:
            print(json.dumps(ranks), file=other, flush=True)
else:
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=60)
            break
        except OSError:
            time.sleep(0.02)
    with connection.makefile("rw") as stream:
        print(rank, file=stream, flush=True)
        ranks = json.loads(stream.readline())

variables = ("RANK", "WORLD_SIZE", "LOCAL_", "ROLE_", "GROUP_", "MASTER_", "RALLYPOINT_", "TORCHELASTIC_")
record: dict[str, object] = {name: value for name, value in os.environ.items() if name.startswith(variables)}
record |= {"pid": os.getpid(), "ranks": ranks, "round": int(os.environ["RALLYPOINT_ROUND"])}
with (folder / f"{os.environ['RALLYPOINT_NODE']}.jsonl").open("a") as file:
    print(json.dumps(record), file=file)
while not (folder / "finish").exists():
    time.sleep(0.02)
