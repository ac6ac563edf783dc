"""The ps task: a parameter server with its connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.cluster.keys import Key
from stratagem.parameter_server.server import ParameterServer
from stratagem.transport.hub import Hub


class ServerTask:
    """One ps task of a job.

    Args:
        address: where it listens, "host:port".
        index: which ps it is.
        key: of the job.
        directory: of snapshots; None: none are written.
    """

    def __init__(self, address: str, index: int, key: Key, directory: str | Path | None):
        self._hub = Hub(f"ps {index}", key)
        self._stopped = False
        self.server: Any = ParameterServer(self._hub, index, directory)
        self._hub.listen(address, self.server.serve)

    def serve(self) -> None:
        """Serves until the coordinator, or `stop`, ends it."""
        try:
            self.server.run(lambda: not self._stopped)
        finally:
            self._hub.close()

    def stop(self) -> None:
        """Ends `serve`; in any thread, and in signal handlers."""
        self._stopped = True
        self._hub.wake()
