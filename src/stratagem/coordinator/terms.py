"""What the user allows the coordinator of a job to do, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.coordinator.consistency import Asynchronous, Consistency

AHEAD_SECONDS = 0.02
"""Of work that a worker of a `ClusterCoordinator` has in hand, where closures are short."""


@dataclass(frozen=True)
class Terms:
    """What the user allows. Times are in seconds.

    Args:
        consistency: when a closure may start.
        depth: how many closures a worker has in hand at most: the next one is there when the
            first is done.
        short_depth: likewise of short closures, so that several travel together.
        ahead: as many closures as take this time are short; 0: none are.
        queue_limit: how many closures may wait before `schedule` blocks.
        worker_seconds: how long work may wait while there is no worker at all.
        server_seconds: how long a server may be lost, and closures may fail for want of it.
        cancel_seconds: how long a cancelled closure is waited for.
        snapshot_seconds: the time between two snapshots.
        snapshot_closures: the finished closures between two snapshots, where that is sooner.
        warn_seconds: after how long something that is waited for is told, and how often then.
        retry_seconds: the first pause before a closure that a worker gave back runs again.
        patience: how long a closure waits behind another one on a busy worker while there is an
            idle one, before that one executes it, too; infinity: for ever.
    """

    consistency: Consistency = Asynchronous()
    depth: int = 2
    short_depth: int = 32
    ahead: float = 0.0
    queue_limit: int = 262_144
    worker_seconds: float = 3600.0
    server_seconds: float = 600.0
    cancel_seconds: float = 60.0
    snapshot_seconds: float = 600.0
    snapshot_closures: int | None = None
    warn_seconds: float = 60.0
    retry_seconds: float = 0.1
    patience: float = 0.1

    def __post_init__(self) -> None:
        for name in ("depth", "short_depth", "queue_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected {name} of at least 1. Got {getattr(self, name)}")
