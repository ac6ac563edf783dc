"""The parameter servers: who is lost, who is restored, and what a snapshot has in it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stratagem.coordinator.instructions import (
    Instruction,
    Pause,
    Restore,
    Resume,
    Snapshot,
    Warn,
)


@dataclass(slots=True)
class _Server:
    name: str
    where: str
    incarnation: str | int | None = None
    kept: int = 0  # How many pushes were finished when its last whole snapshot was asked for.
    at_risk: int = 0  # Most that it can have lost.
    restoring: bool = False

    def __str__(self) -> str:
        return f"{self.name} at {self.where}" if self.where else self.name


class Servers:
    """All parameter servers of a job.

    Args:
        seconds: how long a server may be lost.
        snapshot_seconds: after how long the next snapshot is asked for, if anything has changed.
        snapshot_closures: after how many finished closures; None where that is not counted.
        now: when the job starts.
        resumed: whether the job went on before: then an empty server has lost its content.
        snapshot: number of the last snapshot that was written.
    """

    def __init__(
        self,
        seconds: float,
        snapshot_seconds: float,
        snapshot_closures: int | None,
        now: float,
        resumed: bool = False,
        snapshot: int = 0,
    ) -> None:
        self.pushes = 0  # Of finished closures.
        self.lost_pushes = 0  # To one server each.
        self.losses = 0
        self.resumed_at = now  # When dispatching went on last.
        self._seconds = seconds
        self._snapshot_seconds = snapshot_seconds
        self._snapshot_closures = snapshot_closures or math.inf
        self._resumed = resumed
        self._all: dict[str, _Server] = {}
        self._lost: dict[str, tuple[float, str]] = {}
        self._number = snapshot
        self._asked: int | None = None  # Pushes when the snapshot that is being written was asked.
        self._snapshot_at = now
        self._snapshot_pushes = 0  # When it was asked for last.

    @property
    def paused(self) -> bool:
        """Whether nothing can be dispatched, because a server is lost."""
        return bool(self._lost)

    def add(self, name: str, where: str) -> None:
        """A server belongs to the job."""
        kept = 0 if self._resumed else self.pushes
        server = self._all.setdefault(name, _Server(name, where, kept=kept))
        server.where = where or server.where

    def up(
        self, name: str, incarnation: str | int, ready: bool, now: float, flying: int
    ) -> list[Instruction]:
        """A server was heard. `flying`: how many closures may be pushing to it."""
        self.add(name, "")
        server = self._all[name]
        known, server.incarnation = server.incarnation, incarnation
        out: list[Instruction] = []
        if known is None:
            fresh = self._resumed and not ready
        else:
            fresh = known != incarnation
        if fresh:
            out = self.down(name, "it was started again", now, flying)
        if name not in self._lost:
            return out
        if fresh or server.restoring:
            if ready and not server.restoring:  # It has restored itself.
                return [*out, *self.restored(name, now, None)]
            server.restoring = True
            return [*out, Restore(name)]
        return [*out, *self._back(name, now)]

    def down(self, name: str, why: str, now: float, flying: int) -> list[Instruction]:
        """A server is lost, or out of reach."""
        self.add(name, "")
        server = self._all[name]
        if name in self._lost:
            return []
        server.at_risk = self.pushes - server.kept + flying
        self.losses += 1
        first = not self._lost
        self._lost[name] = (now, why)
        if not first:
            return [Warn(f"{server} is lost, too: {why}")]
        return [Pause(f"{server} is lost: {why}. Training goes on when it is back")]

    def restored(self, name: str, now: float, lost: int | None) -> list[Instruction]:
        """A server has content again. `lost`: pushes that are not in it; None: not known."""
        server = self._all[name]
        server.restoring = False
        most = server.at_risk if lost is None else lost
        self.lost_pushes += most
        server.kept = self.pushes - max(0, server.at_risk - most)
        word = "at most " if lost is None else ""
        said = f"{server} is restored; {word}{most} pushes to it are lost"
        return [Warn(said), *self._back(name, now)]

    def _back(self, name: str, now: float) -> list[Instruction]:
        if self._lost.pop(name, None) is None or self._lost:
            return []
        self.resumed_at = now
        return [Resume()]

    def tick(self, now: float) -> tuple[list[Instruction], str]:
        """What is due; and the text of the error where a server was lost for too long."""
        for name, (since, why) in self._lost.items():
            if now - since >= self._seconds:
                self._lost[name] = (now, why)  # If the program goes on, it waits again.
                doing = "being restored" if self._all[name].restoring else "out of reach"
                text = (
                    f"Expected {self._all[name]} to serve again within {self._seconds:g} s. Got "
                    f"none of it: it is {doing} ({why}). Start it again at that address (the "
                    "supervisor of `stratagem run` does), or restart the job; it goes on from the "
                    "last snapshot"
                )
                return [], text
        if self._asked is not None or self._lost or self.pushes == self._snapshot_pushes:
            return [], ""
        pushes = self.pushes - self._snapshot_pushes
        if now - self._snapshot_at < self._snapshot_seconds and pushes < self._snapshot_closures:
            return [], ""
        self._number += 1
        self._asked = self._snapshot_pushes = self.pushes
        self._snapshot_at = now
        return [Snapshot(self._number)], ""

    def written(self, number: int) -> None:
        """All servers have a whole snapshot of a number."""
        if number == self._number and self._asked is not None:
            for server in self._all.values():
                server.kept = max(server.kept, self._asked)
            self._asked = None

    def failed(self, number: int, why: str) -> list[Instruction]:
        """A snapshot could not be written by all."""
        if number != self._number or self._asked is None:
            return []
        self._asked = None
        return [
            Warn(
                f"Expected snapshot {number} of the parameter servers to be written. Got: {why}. "
                f"The next one is tried in {self._snapshot_seconds:g} s; until then the one "
                "before it is what a lost server is restored from"
            )
        ]
