"""What a parameter server costs on this machine: measured with one in a process of its own.

    python -m stratagem.cli.calibrate_servers [--no-shared-memory]

Prints one line of JSON, as `calibrate_measure` does: the fields of `planning.machines.Serving`, but
what tasks on one machine do not have (a network, encryption) is what they have instead of it: they
talk through shared memory. Without that, arrays are encrypted, both ends by the cores of this
machine, and the figure of `copy` is how fast.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stratagem import config
from stratagem.cli.calibrate_measure import MARK
from stratagem.cluster.keys import VARIABLE, Key
from stratagem.coordinator.instructions import Dispatch, Instruction
from stratagem.coordinator.state import State
from stratagem.launcher.local import free_ports
from stratagem.parameter_server import initial, rows
from stratagem.parameter_server.client import Item, Servers
from stratagem.parameter_server.plan import Placement, Spec, Unit
from stratagem.parameter_server.task import ServerTask
from stratagem.transport.hub import Hub
from stratagem.transport.message import LIMITS
from stratagem.transport.sockets import Sockets

_REPEATS, _TIMES = 20, 5
_START_SECONDS = 60.0
_NO_SHARED_MEMORY = "--no-shared-memory"
_LARGE = 1 << 22  # float32 values of a variable that is larger than caches
_ROWS, _LOOKED_UP, _WIDTH = 1 << 18, 1 << 14, 64  # of a table
_CLOSURES = 2000
_SGD = rows.RowProgram(1, (rows.ROWS,), (rows.Step("sub", (0, 1)),), (2,))


def main(arguments: Sequence[str]) -> int:
    """Measures; or, as `serve PORT FOLDER`, is the server. Returns the exit code."""
    if arguments[:1] == ["serve"]:
        key = Key.always(config.environment())
        ServerTask(f"127.0.0.1:{arguments[1]}", 0, key, arguments[2]).serve()
        return 0
    print(MARK + json.dumps(measure(share=arguments != [_NO_SHARED_MEMORY])), flush=True)
    return 0


def measure(share: bool = True) -> dict[str, float]:
    """The constants of `Serving`.

    Args:
        share: whether arrays go through shared memory.
    """
    with _servers(share) as servers:
        small, large, table = _variables(servers)
        round_trip = _least(lambda: servers.pull([small]))
        whole = _least(lambda: servers.pull([large])) - round_trip
        random = np.random.default_rng(0)
        ids = np.sort(random.choice(_ROWS, _LOOKED_UP, replace=False)).astype(np.int64)
        looked_up = _least(lambda: servers.pull((), [(table, ids)])) - round_trip
        values = np.zeros(_LARGE, np.float32)
        few = np.zeros((_LOOKED_UP, _WIDTH), np.float32)
        changed = _least(_pushes(servers, large, None, values)) - round_trip
        touched = _least(_pushes(servers, table, ids, few)) - round_trip
        written = _timed(lambda: servers.snapshot(1, 1))
        held = sum(spec.nbytes for spec in (small, large, table))
    copy = large.nbytes / max(whole, 1e-6)
    update = max(changed - whole, changed / 10)
    moved = few.nbytes / copy
    return {
        "latency": round_trip / 4,  # there and back; the rest is work at both ends
        "message": round_trip / 4,
        "bandwidth": copy,
        "stream": copy,
        "encrypt": copy,
        "copy": copy,
        "row": max(looked_up - moved, touched - moved, 1e-4) / _LOOKED_UP,
        "update": large.nbytes / max(update, 1e-6),
        "dispatch": round_trip / 4 + _decide(),  # a request and its answer at this end
        "disk": held / max(written, 1e-6),
    }


@contextlib.contextmanager
def _servers(share: bool) -> Iterator[Servers]:
    """A parameter server in a process of its own, and the way to it."""
    (port,) = free_ports(1)
    secret = secrets.token_hex(16)
    environment = {**config.environment(), VARIABLE: secret}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stratagem.cli.calibrate_servers", "serve", str(port)]
        process = subprocess.Popen([*command, folder], env=environment)
        hub = Hub("calibration", carrier=Sockets("calibration", Key(secret), LIMITS, share))
        try:
            peer = hub.connect(f"127.0.0.1:{port}", "ps 0")
            servers = Servers(hub, [peer], "calibration", "calibration", _START_SECONDS)
            servers.hello(start=True)
            yield servers
        finally:
            hub.close()
            process.terminate()
            process.wait()


def _variables(servers: Servers) -> tuple[Spec, Spec, Spec]:
    """A scalar, a large array and a table, the latter two with an update of SGD each."""
    place = Placement(1).place
    small = place(0, "small", (), "float32")
    large = place(1, "large", (_LARGE,), "float32")
    table = place(2, "table", (_ROWS, _WIDTH), "float32")
    servers.create([small, large, table], dict.fromkeys(range(3), initial.constant(0.0)))
    servers.install([_unit(large), _unit(table)])
    return small, large, table


def _unit(spec: Spec) -> Unit:
    return Unit(f"sgd {spec.vid}", (spec.vid,), _SGD.to_wire())


def _pushes(
    servers: Servers, spec: Spec, ids: np.ndarray | None, values: np.ndarray
) -> Callable[[], Any]:
    """Pushes to a variable, each under a number of its own."""
    item = Item(_unit(spec), ids, [(rows.ROWS, values)])

    def push() -> None:
        number = next(_numbers)
        servers.push(number, number, [item])

    return push


_numbers = itertools.count(1)  # of pushes: each is applied once


def _decide() -> float:
    """Seconds that the coordinator's state takes for a closure."""
    state = State()
    flying: list[Dispatch] = []

    def obey(found: Sequence[Instruction]) -> None:
        flying.extend(each for each in found if isinstance(each, Dispatch))

    obey(state.add_worker("worker 0", "here", 0.0))
    obey(state.worker_up("worker 0", 1, 0.0))

    def run() -> None:
        for _ in range(_CLOSURES):
            obey(state.ask("schedule", 0.0)[1])
            obey(state.schedule(0.0)[1])
            closure = flying.pop(0).closure
            obey(state.finished("worker 0", 1, closure, "ok", 0.0))

    return _timed(run) / _CLOSURES


def _least(call: Callable[[], Any]) -> float:
    """The shortest of several means of a few calls each, in seconds; after a first one."""
    call()
    return min(_timed(lambda: [call() for _ in range(_TIMES)]) for _ in range(_REPEATS)) / _TIMES


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
