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

record = {"pid": os.getpid(), "ranks": ranks, "round": int(os.environ["RALLYPOINT_ROUND"])}
record |= {
    name: value for name, value in os.environ.items() if name.startswith(("RALLYPOINT_", "TORCHELASTIC_"))
}
names: tuple[str, ...] = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
names += ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
record |= {name: os.environ.get(name) for name in names}
with (folder / f"{os.environ['RALLYPOINT_NODE']}.jsonl").open("a") as file:
    print(json.dumps(record), file=file)
while not (folder / "finish").exists():
    time.sleep(0.02)
