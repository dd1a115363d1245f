"""Starts a script once a rank, as mpirun does on one machine: `spawn.py RANKS SCRIPT`. One that fails ends
the others."""

import os
import socket
import subprocess
import sys
import time

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
world = sys.argv[1]
own = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[2:]], env={**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    )
    for rank in range(int(world))
]
while any(rank.poll() is None for rank in ranks):
    failed = [rank for rank in ranks if rank.poll()]
    if failed:
        number = ranks.index(failed[0])
        print(
            f"rank {number} (pid {failed[0].pid}) ended with {failed[0].returncode}: the others are ended",
            flush=True,
        )
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()
        sys.exit(1)
    time.sleep(0.2)
sys.exit(max(rank.returncode for rank in ranks))
