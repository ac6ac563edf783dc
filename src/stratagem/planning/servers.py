"""How fast workers and parameter servers are together: closed form.

A step of a worker is a pull, computing and a push, one after the other. Its servers answer at the
same time; each of their resources does one thing at a time. Of W workers the rate is at most

    min(W / T, 1 / D)

steps a second: T is the time of a step that nobody disturbs, D the longest that a step keeps one
resource busy (asymptotic bounds; P. Denning, J. Buzen, Computing Surveys 10(3), 1978).
From W = T / D on the servers are saturated. For a model of n bytes, pulled and pushed whole from k
servers of B bytes a second, 1 / D is k*B/n: a round of p workers takes p*n/(k*B), as formulas for
parameter servers on machines of their own have it (Jiang et al., BytePS, OSDI 2020, table 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.planning import predict, served
from stratagem.planning.machines import Machine, Serving
from stratagem.planning.served import Load, Served

NETWORK_OUT, NETWORK_IN = "network, out of a ps", "network, into a ps"
CPU, ENCRYPTION, COORDINATOR = "CPU of a ps", "encryption at a ps", "coordinator"
_SATURATED = 0.95  # of the rate with ever more servers, from which on more are not worth it
_MOST_SERVERS = 4096


@dataclass(frozen=True)
class Exchange:
    """What a step costs at one server. Seconds, and bytes.

    Attributes:
        asked: into it, with the pull.
        pulled: out of it.
        pushed: into it.
        pull: of its CPU, for the pull.
        push: of its CPU, for the push and the update.
        by_row: rows of tables are pushed, which a hybrid rule applies at once.
    """

    asked: float
    pulled: float
    pushed: float
    pull: float
    push: float
    by_row: bool = False


@dataclass(frozen=True)
class Costs:
    """What a step costs everywhere.

    Attributes:
        exchanges: with each server that has a part of it.
        compute: seconds of a worker.
        dispatch: seconds of the coordinator, for handing out and for the answer together.
        sent: bytes with the closure.
        returned: bytes of its results.
        serving: constants of the machines.
    """

    exchanges: tuple[Exchange, ...]
    compute: float
    dispatch: float
    sent: float
    returned: float
    serving: Serving

    @property
    def pull(self) -> float:
        """Seconds of a pull that nobody disturbs."""
        return self._phase([(e.asked, e.pull, e.pulled) for e in self.exchanges])

    @property
    def push(self) -> float:
        """Seconds of a push that nobody disturbs."""
        return self._phase([(e.pushed, e.push, 0.0) for e in self.exchanges])

    def _phase(self, parts: Sequence[tuple[float, float, float]]) -> float:
        """The slowest server, or what the worker's own network and encryption take."""
        s = self.serving
        parts = [(a, cpu, b) for a, cpu, b in parts if cpu]
        if not parts:
            return 0.0
        slowest = max((a + b) / rate(s) + cpu for a, cpu, b in parts)
        into, out = sum(b for _, _, b in parts), sum(a for a, _, _ in parts)
        own = max(into / s.bandwidth, out / s.bandwidth, (into + out) / s.encrypt)
        least = min(cpu for _, cpu, _ in parts)
        return 2 * s.latency + len(parts) * s.message + max(slowest, own + least)

    @property
    def seconds(self) -> float:
        """T: of a step that nobody disturbs; the closure is with the worker already."""
        return self.pull + self.compute + self.push

    @property
    def busy(self) -> dict[str, float]:
        """Seconds that a step keeps each kind of resource busy, of the busiest of its kind."""
        s, every = self.serving, self.exchanges
        return {
            NETWORK_OUT: max((e.pulled for e in every), default=0.0) / s.bandwidth,
            NETWORK_IN: max((e.asked + e.pushed for e in every), default=0.0) / s.bandwidth,
            ENCRYPTION: max((e.asked + e.pulled + e.pushed for e in every), default=0) / s.encrypt,
            CPU: max((e.pull + e.push for e in every), default=0.0),
            COORDINATOR: self.dispatch,
        }

    @property
    def bound(self) -> str:
        """What is saturated first."""
        return max(self.busy.items(), key=lambda item: item[1])[0]

    @property
    def saturates(self) -> float:
        """The number of workers from which on it is: T / D."""
        return self.seconds / self.busy[self.bound]

    def rate(self, workers: int) -> float:
        """Steps a second of so many workers, at most."""
        return min(workers / self.seconds, 1 / self.busy[self.bound])

    @property
    def requests(self) -> int:
        """Requests to servers of a step."""
        return sum((e.pull > 0) + (e.push > 0) for e in self.exchanges)


def rate(serving: Serving) -> float:
    """Bytes a second of one connection."""
    return min(serving.stream, serving.bandwidth, serving.encrypt)


def costs(step: Served, machine: Machine, servers: int | None = None) -> Costs:
    """What the step costs on machines of this kind.

    Args:
        step: counted.
        machine: of workers, servers and coordinator alike, one for each task.
        servers: another number than it was placed on.

    Raises:
        ValueError: it is not known what it costs to serve on it.
    """
    s = machine.serving
    if s is None:
        raise ValueError(
            f"--machine: expected one that says what it costs to serve on it. Got {machine.name}. "
            "Describe [machine.serving] in the file that --calibrate writes, or take another one."
        )
    if servers is None or servers == step.servers:
        loads = served.on_each(step.loads, step.servers)
    else:
        loads = served.on_others(step.loads, servers)
    return Costs(
        tuple(_exchange(load, s) for load in loads if load.pulled or load.updated),
        predict.compute(step.work, machine),
        s.dispatch + (step.sent + step.returned) / s.encrypt,
        step.sent,
        step.returned,
        s,
    )


def _exchange(load: Load, s: Serving) -> Exchange:
    pull = push = 0.0
    if load.pulled:
        pull = s.message + load.rows * s.row + (load.asked + load.pulled) / s.copy
    if load.updated:
        moved = (load.pushed + load.summed) / s.copy
        push = s.message + load.touched * s.row + moved + load.updated / s.update
    return Exchange(load.asked, load.pulled, load.pushed, pull, push, load.touched > 0)


def worth(step: Served, machine: Machine, workers: int) -> int:
    """The fewest servers with which so many workers are about as fast as with ever more."""
    at = _counts(workers)
    rates = [costs(step, machine, k).rate(workers) for k in at]
    best = max(rates)
    return next(k for k, found in zip(at, rates, strict=True) if found >= _SATURATED * best)


def _counts(workers: int) -> list[int]:
    """Numbers of servers to look at: each one up to 64, then in steps of a quarter."""
    found, most = [1], min(_MOST_SERVERS, max(8, 4 * workers))
    while found[-1] < most:
        found.append(found[-1] + 1 if found[-1] < 64 else found[-1] * 5 // 4)
    return found
