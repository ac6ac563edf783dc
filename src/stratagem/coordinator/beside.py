"""Worker 0 of a cluster without a chief: the coordinator, with a process beside it that serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stratagem.cluster.spec import ClusterSpec

_SECONDS = 5.0  # to leave
# Run as a file: it ends what it has started, however this process ends.
_GUARD = Path(__file__).parents[1] / "launcher" / "guard.py"


class Beside:
    """A worker task in a process of its own, which ends with this one.

    Args:
        cluster: all tasks.
        index: which worker it is.
    """

    def __init__(self, cluster: ClusterSpec, index: int):
        reads, self._writes = os.pipe()
        command = [
            sys.executable, str(_GUARD), str(reads), sys.executable, "-m", "stratagem.cli", "serve",
            "--task-type", "worker", "--index", str(index),
            "--cluster", json.dumps(cluster.as_dict()),
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(command, pass_fds=[reads], stdin=subprocess.DEVNULL)
        finally:
            os.close(reads)

    def close(self) -> None:
        """Ends it."""
        if self._writes < 0:
            return
        self._process.terminate()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # the guard kills it when the pipe closes
        os.close(self._writes)
        self._writes = -1
        self._process.wait(_SECONDS)
