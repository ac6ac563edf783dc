"""The coordinator alone: dispatches per second and memory, with 10 to 10,000 simulated workers.

    python benchmarks/coordinator_alone.py [--workers 10 100 1000 10000] [--closures 20000]

Two parts, each figure in a process of its own, so that memory means something:

- state: `coordinator.state.State`, the pure part: events in, instructions out;
- wire: the same, with a request and an answer through the in-process network for each dispatch
  (`transport.local`): packing, numbering and delivering included, sockets not.

Workers answer at once. Seconds are those of the processor, since one thread does everything and
waits for nothing. Memory is the growth of the process from before the workers are added until each
has as many closures in hand as it takes and as many again are queued, shared out over the workers;
in "wire" the other end of each connection is part of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stratagem.coordinator.instructions import Dispatch, Instruction, Resolve
from stratagem.coordinator.state import State
from stratagem.coordinator.terms import Terms
from stratagem.transport.hub import Hub
from stratagem.transport.local import LocalNetwork
from stratagem.transport.message import Message

PARTS = ("state", "wire")
WORKERS = (10, 100, 1000, 10_000)
SECONDS = 60.0
LONGEST = 600.0  # of one process


class Job:
    """A state with workers that answer.

    Args:
        workers: how many.
        send: passes a dispatch to its worker, which answers with `answered`.
    """

    def __init__(self, workers: int, send: Callable[[Dispatch], None]):
        self._state, self._send = State(), send
        self.scheduled = self.resolved = 0
        self._enough = 2 * Terms().depth * workers
        for index in range(workers):
            self._obey(self._state.add_worker(f"worker {index}", "here", 0.0))
            self._obey(self._state.worker_up(f"worker {index}", 1, 0.0))

    def schedule(self) -> None:
        """One closure more."""
        answer, out = self._state.ask("schedule", 0.0)
        self._obey(out)
        assert type(answer).__name__ == "Go", answer
        self.scheduled += 1
        self._obey(self._state.schedule(0.0)[1])

    def answered(self, dispatch: Dispatch) -> None:
        """A worker has done a closure."""
        worker, closure = dispatch.worker, dispatch.closure
        self._obey(self._state.finished(worker, 1, closure, "ok", 0.0, staleness=1, rows=512))

    def _obey(self, instructions: Iterable[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Dispatch):
                self._send(one)
            elif isinstance(one, Resolve):
                self.resolved += 1

    def go_on(self, closures: int, turn: Callable[[], None]) -> None:
        """Schedules so many, and waits where there are enough.

        Args:
            closures: how many.
            turn: lets workers answer, at least one.
        """
        for _ in range(closures):
            self.schedule()
            while self.scheduled - self.resolved > self._enough:
                turn()

    def end(self, turn: Callable[[], None]) -> None:
        """Waits for all that were scheduled."""
        while self.resolved < self.scheduled:
            turn()


def state_alone(workers: int) -> tuple[Job, Callable[[], None]]:
    """A job of the pure part, and its turn."""
    flying: deque[Dispatch] = deque()
    job = Job(workers, flying.append)
    return job, lambda: job.answered(flying.popleft())


def over_the_wire(workers: int) -> tuple[Job, Callable[[], None]]:
    """The same, through the in-process network."""
    network = LocalNetwork()
    hub = network.hub("coordinator")
    hubs: list[Hub] = []
    peers: dict[str, Any] = {}
    for index in range(workers):
        hubs.append(network.hub(f"worker {index}"))
        hubs[-1].listen(f"here:{index + 1}", lambda request: Message("done", {"staleness": 1}))
        peers[f"worker {index}"] = hub.connect(f"here:{index + 1}", f"worker {index}")

    def send(dispatch: Dispatch) -> None:
        fields = {"closure": dispatch.closure, "token": dispatch.token, "below": dispatch.below}

        def done(answer: Message | Exception) -> None:
            assert isinstance(answer, Message), answer
            job.answered(dispatch)

        peers[dispatch.worker].post("run", fields, seconds=SECONDS, done=done)

    job = Job(workers, send)
    return job, lambda: hub.turn(0.1)


def memory() -> int:
    """Bytes that this process has in memory now."""
    return psutil.Process().memory_info().rss


def measure(part: str, workers: int, closures: int) -> dict[str, Any]:
    """One figure; in this process."""
    make = {"state": state_alone, "wire": over_the_wire}[part]
    job, turn = make(10)
    job.go_on(1000, turn)  # what is made once is made now
    gc.collect()
    before = memory()
    job, turn = make(workers)
    job.go_on(closures, turn)
    held = memory() - before
    start = time.process_time()
    job.go_on(closures, turn)
    seconds = time.process_time() - start
    job.end(turn)
    return {
        "part": part,
        "workers": workers,
        "closures": closures,
        "dispatches_per_second": closures / seconds,
        "bytes_per_worker": held / workers,
        "bytes": before + held,
    }


def apart(part: str, workers: int, closures: int) -> dict[str, Any]:
    """One figure; in a process of its own."""
    command = [sys.executable, __file__, "--one", part, str(workers), str(closures)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LONGEST)
    return json.loads(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--closures", type=int, default=20_000, help="at least; 8 a worker")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, workers, closures = options.one
        print(json.dumps(measure(part, int(workers), int(closures))))
        return
    found = [
        apart(part, workers, max(options.closures, 8 * workers))
        for part in PARTS
        for workers in options.workers
    ]
    table = Table(title="The coordinator alone", title_justify="left")
    for heading in ("part", "workers", "dispatches/s", "bytes a worker", "all, MB"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for one in found:
        table.add_row(
            one["part"], f"{one['workers']:,}", f"{one['dispatches_per_second']:,.0f}",
            f"{one['bytes_per_worker']:,.0f}", f"{one['bytes'] / 1e6:,.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
