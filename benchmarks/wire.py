"""What a step of the lookup case moves between tasks, and the share of what loopback can carry.

    python benchmarks/wire.py [--steps 200] [--json FILE]

1 ps and 2 workers, see `cases/ps_problems.py`: once as it is, where tasks of one host have shared
memory, and once with arrays in the (encrypted) messages. Bytes over loopback are the kernel's own
count. `rows` are the rows that a batch looks up, once there and once back as their gradients, both
times with their numbers. `sums` are what the step needs of them: one row for each bag of ids, and
its gradient, with the rows' numbers and which bag has which, both times. The limit is what one TCP
connection carries between two threads that do nothing else, one way.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import stratagem  # before Keras

# isort: split
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "cases"))
import ps_problems
import ps_stratagem
import ps_tasks

PATHS = {"shared memory": "", "messages": "1"}
RAW_BYTES, RAW_PIECE = 4 << 30, 1 << 20


def loopback_limit() -> float:
    """Bytes a second that one connection carries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        piece, room = bytes(RAW_PIECE), bytearray(RAW_PIECE)
        thread = threading.Thread(
            target=lambda: [sender.sendall(piece) for _ in range(RAW_BYTES // RAW_PIECE)]
        )
        start, left = time.perf_counter(), RAW_BYTES
        thread.start()
        while left:
            left -= receiver.recv_into(room)
        seconds = time.perf_counter() - start
        thread.join()
    return RAW_BYTES / seconds


def rows_bytes(ids: str) -> float:
    """Bytes of rows, gradients and row numbers of a step, each row once."""
    each = [len(np.unique(batch)) for batch in ps_problems.id_batches(ids)]
    return statistics.mean(each) * 2 * (ps_problems.WIDTH * 4 + 8)


def sums_bytes(ids: str) -> float:
    """Bytes of sums, their gradients, row numbers and bags of a step."""
    each = [len(np.unique(batch)) for batch in ps_problems.id_batches(ids)]
    bags = ps_problems.BATCH * (ps_problems.WIDTH * 4 + ps_problems.FIELDS * 4 + 4) + 4
    return 2 * (statistics.mean(each) * 8 + bags)


def over_loopback() -> int:
    """Bytes that the kernel has carried over loopback."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def measure(ids: str, way: str, steps: int) -> tuple[float, float]:
    """Bytes over loopback in a step, and steps a second."""
    with (
        mock.patch.dict(os.environ, {"BENCH_NO_SHARED_MEMORY": PATHS[way]}),
        ps_tasks.running("ps_task_stratagem.py", 1, 2) as (cluster, _),
    ):
        strategy = ps_stratagem.strategy_on(cluster)
        coordinator = stratagem.coordinator.ClusterCoordinator(strategy)
        step, args, _ = ps_stratagem.CASES[ids](strategy, coordinator)

        def run(count: int) -> None:
            for _ in range(count):
                coordinator.schedule(step, args=args)
            coordinator.join()

        run(20)
        before, start = over_loopback(), time.perf_counter()
        run(steps)
        seconds = time.perf_counter() - start
        moved = over_loopback() - before
        strategy.close()
    return moved / steps, steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, Any] = {"limit": loopback_limit()}
    print(f"one connection over loopback carries {found['limit'] / 1e9:.2f} GB/s")
    for ids in ("uniform", "zipf"):
        rows, sums = rows_bytes(ids), sums_bytes(ids)
        for way in PATHS:
            moved, speed = measure(ids, way, options.steps)
            share = moved * speed / found["limit"]
            one = {"rows": rows, "sums": sums, "bytes": moved, "speed": speed, "share": share}
            found[f"{ids}, {way}"] = one
            print(
                f"{ids} ids, {way}: {rows / 1e6:.2f} MB of rows a step, {sums / 1e6:.2f} MB as "
                f"sums; {moved / 1e6:.2f} MB over loopback, {speed:.0f} steps/s, {share:.0%} of "
                "what loopback carries"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
