"""The coordinator alone: dispatches per second and memory, with 10 to 10,000 simulated workers.

    python benchmarks/coordinator_alone.py [--workers 10 100 1000 10000] [--closures 20000]

Two parts, each figure in a process of its own, so that memory means something:

- state: `coordinator.state.State`, the pure part: events in, instructions out;
- wire: the same, with a request and an answer through the in-process network for each dispatch
  (`transport.local`): packing, numbering and delivering included, sockets not.

Workers answer at once. Memory is the growth of the process while the workers are added and all
closures run, shared out over the workers.
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
        self.resolved = 0
        for index in range(workers):
            self._obey(self._state.add_worker(f"worker {index}", "here", 0.0))
            self._obey(self._state.worker_up(f"worker {index}", 1, 0.0))

    def schedule(self) -> None:
        """One closure more."""
        answer, out = self._state.ask("schedule", 0.0)
        self._obey(out)
        assert type(answer).__name__ == "Go", answer
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


def state_alone(workers: int, closures: int) -> Callable[[], None]:
    """A run of the pure part, to be timed."""
    flying: deque[Dispatch] = deque()
    job = Job(workers, flying.append)

    def run() -> None:
        done = job.resolved + closures
        for _ in range(closures):
            job.schedule()
            if len(flying) >= workers:
                job.answered(flying.popleft())
        while job.resolved < done:
            job.answered(flying.popleft())

    return run


def over_the_wire(workers: int, closures: int) -> Callable[[], None]:
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

    def run() -> None:
        done = job.resolved + closures
        for scheduled in range(closures):
            job.schedule()
            if scheduled % 100 == 0:
                hub.turn(0.0)
        while job.resolved < done:
            hub.turn(0.1)

    return run


def memory() -> int:
    """Bytes that this process has in memory now."""
    return psutil.Process().memory_info().rss


def measure(part: str, workers: int, closures: int) -> dict[str, Any]:
    """One figure; in this process."""
    gc.collect()
    before = memory()
    run = {"state": state_alone, "wire": over_the_wire}[part](workers, closures)
    run()  # warm
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {
        "part": part,
        "workers": workers,
        "closures": closures,
        "dispatches_per_second": closures / seconds,
        "bytes_per_worker": (memory() - before) / workers,
        "bytes": memory(),
    }


def apart(part: str, workers: int, closures: int) -> dict[str, Any]:
    """One figure; in a process of its own."""
    command = [sys.executable, __file__, "--one", part, str(workers), str(closures)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LONGEST)
    return json.loads(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--closures", type=int, default=20_000, help="at least; 4 a worker")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, workers, closures = options.one
        print(json.dumps(measure(part, int(workers), int(closures))))
        return
    found = [
        apart(part, workers, max(options.closures, 4 * workers))
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
