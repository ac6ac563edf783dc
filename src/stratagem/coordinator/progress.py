"""What is finished of a job: what a journal holds, and a restarted coordinator begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stratagem.coordinator.watermark import Watermark


@dataclass
class DataProgress:
    """How far the accounted dataset of one epoch is.

    Args:
        done: batches that are finished, those too that came too late for their round.
        open: tokens of batches that were leased, and are not known to be finished.
    """

    done: Watermark = field(default_factory=Watermark)
    open: dict[int, int] = field(default_factory=dict)


@dataclass
class Progress:
    """How far a job is.

    Args:
        job: its id; servers hold the state of one job.
        next_token: no closure has had this number or a larger one.
        data: accounted datasets that are not released, by key.
        lost_pushes: how many pushes lost servers have lost in all.
        snapshot: number of the last snapshot that all servers have written.
        since: how many pushes were finished since that snapshot was asked for; at most.
        asked: likewise, since a snapshot was asked for last, which need not be written yet.
        mark: what the program said last of where it is, such as its epoch and step.
        logs: what epochs have reported, by the names of their datasets.
        ended: whether the job is done.
        perhaps: whether it is if its coordinator has left with exit code 0.
    """

    job: str = ""
    next_token: int = 0
    data: dict[str, DataProgress] = field(default_factory=dict)
    lost_pushes: int = 0
    snapshot: int = 0
    since: int = 0
    asked: int = 0
    mark: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False
    perhaps: bool = False
