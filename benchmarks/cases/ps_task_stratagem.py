"""A ps or worker task of Stratagem; TF_CONFIG says which.

With BENCH_NO_SHARED_MEMORY arrays travel in messages, as between two machines.
"""

from __future__ import annotations

import json
import os

import ps_tasks

import stratagem
from stratagem.transport import sockets
from stratagem.transport.shares import Shares


def main() -> None:
    if os.environ.get("BENCH_NO_SHARED_MEMORY"):
        sockets.SharedMemory = Shares  # type: ignore[misc]
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    server = stratagem.distribute.Server(
        config["cluster"], job_name=task["type"], task_index=task["index"]
    )
    ps_tasks.end_with_parent()
    server.stop()


if __name__ == "__main__":
    main()
