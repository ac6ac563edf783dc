"""From a step in parts and a cluster to rates, staleness, and how many servers to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.coordinator import consistency
from stratagem.planning import served, servers, staleness
from stratagem.planning.machines import Machine
from stratagem.planning.served import Load, Served
from stratagem.planning.servers import COORDINATOR, Costs
from stratagem.planning.staleness import Simulated

_UNEVEN = 1.5  # of the mean, from which on the busiest server is worth a note
_LITTLE = 1e8  # bytes of a server, up to which it does not matter how full others are
_LARGE = 1e6  # bytes of a variable that is pulled whole, from which on it is worth a note
_MOSTLY = 0.75
_GIGA = 1e9


@dataclass(frozen=True)
class Point:
    """Another number of workers, or of servers.

    Attributes:
        workers: how many.
        servers: how many.
        rate: steps a second, at most.
        bound: what is saturated; "workers" where nothing is.
    """

    workers: int
    servers: int
    rate: float
    bound: str


@dataclass(frozen=True)
class ServedPlan:
    """All that is predicted.

    Attributes:
        machine: of each task.
        workers: how many.
        step: what was counted.
        rule: of consistency: "mode", "max_staleness", "backup_workers".
        costs: of a step.
        simulated: the cluster for a while.
        loads: what a step does with each server.
        by_workers: the same servers with other numbers of workers.
        by_servers: the same workers with other numbers of servers.
        worth: how many servers are about as fast as ever more.
        snapshot: seconds that the servers write one.
        notes: what a reader must know to judge the figures.
    """

    machine: Machine
    workers: int
    step: Served
    rule: Mapping[str, Any]
    costs: Costs
    simulated: Simulated
    loads: tuple[Load, ...]
    by_workers: tuple[Point, ...]
    by_servers: tuple[Point, ...]
    worth: int
    snapshot: float
    notes: tuple[str, ...]

    @property
    def servers(self) -> int:
        """How many there are."""
        return self.step.servers

    @property
    def seconds(self) -> float:
        """Of a step of one worker, among all others."""
        s = self.simulated
        return s.waiting + s.pull + s.compute + s.push

    @property
    def rows_per_second(self) -> float:
        """All workers together, simulated; 0 where the rows are not known."""
        return self.step.work.rows * self.simulated.rate

    @property
    def balance(self) -> float:
        """Bytes of the fullest server, of the mean."""
        return _over_mean([load.held for load in self.loads])


def plan(
    step: Served, machine: Machine, workers: int, rule: Mapping[str, Any], seed: int = 0
) -> ServedPlan:
    """Predicts the step on so many workers and the servers that it was placed on.

    Args:
        step: counted.
        machine: of each task; one that says what it costs to serve on it.
        workers: how many.
        rule: of consistency: "mode", "max_staleness", "backup_workers".
        seed: of the simulation.
    """
    costs = servers.costs(step, machine)
    simulated = staleness.simulate(costs, workers, consistency.rule(**rule), seed=seed)
    loads = tuple(served.on_each(step.loads, step.servers))
    best = servers.worth(step, machine, workers)
    constants = costs.serving
    made = ServedPlan(
        machine=machine,
        workers=workers,
        step=step,
        rule=dict(rule),
        costs=costs,
        simulated=simulated,
        loads=loads,
        by_workers=tuple(
            _point(costs, n, step.servers)
            for n in _numbers(max(2 * workers, 8), workers, *_knee(costs, 2 * workers))
        ),
        by_servers=tuple(
            _point(servers.costs(step, machine, n), workers, n)
            for n in _numbers(max(2 * best, 2 * step.servers), step.servers, best)
        ),
        worth=best,
        snapshot=max(load.held for load in loads) / constants.disk,
        notes=(),
    )
    return dataclasses.replace(made, notes=_notes(made))


def _point(costs: Costs, workers: int, count: int) -> Point:
    saturated = workers >= costs.saturates
    return Point(workers, count, costs.rate(workers), costs.bound if saturated else "workers")


def _numbers(most: int, *others: int) -> list[int]:
    """1, 2, 4 and so on, with some others between them."""
    found = {*others}
    number = 1
    while number < 2 * most:
        found.add(number)
        number *= 2
    return sorted(found)


def _knee(costs: Costs, most: int) -> list[int]:
    """The number of workers from which on more bring nothing, where it is below some number."""
    whole = math.ceil(costs.saturates)
    return [whole] if whole < most else []


def _over_mean(sizes: list[float]) -> float:
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


def _even(made: ServedPlan) -> str:
    """What makes the servers more alike."""
    if made.balance > _UNEVEN:
        return (
            "A partitioner divides variables among them: stratagem.experimental.partitioners, with "
            "as many shards."
        )
    return "Rows that many batches name are on the same ps: number the rows in a random order."


def _notes(made: ServedPlan) -> tuple[str, ...]:
    step, machine, costs = made.step, made.machine, made.costs
    notes = []
    if not step.work.writes:
        notes.append(
            f"The first step that the script ran, {step.work.caught}, writes no trainable "
            "variable: it does not train. Let the script train first."
        )
    fullest = max(load.held for load in made.loads)
    if fullest > machine.memory:
        notes.append(
            f"The variables do not fit: {fullest / _GIGA:,.1f} GB on a ps of "
            f"{machine.memory / _GIGA:,.1f} GB. Take more servers, with a partitioner."
        )
    traffic = _over_mean([load.pulled + load.asked + load.pushed for load in made.loads])
    full = made.balance > _UNEVEN and fullest > _LITTLE
    if len(made.loads) > 1 and (full or (traffic > _UNEVEN and costs.bound != COORDINATOR)):
        notes.append(
            f"The servers are not equal: one holds {made.balance:.1f} times the mean, one moves "
            f"{traffic:.1f} times the mean. {_even(made)}"
        )
    large = [(name, n) for name, n in step.whole if n >= _LARGE]
    if large and sum(n for _, n in large) > _MOSTLY * step.pulled:
        name, nbytes = max(large, key=lambda item: item[1])
        notes.append(
            f"Most of what is pulled are variables whole, {name} of {nbytes / 1e6:.3g} MB the "
            "largest: such a model is for MultiWorkerMirroredStrategy rather."
        )
    if any(table.known == "estimate" for table in step.tables):
        notes.append(
            "The rows of tables are scaled up from the script's smaller batch, which gives more "
            "than there will be: larger batches name the same rows more often. Say --table-rows."
        )
    if made.workers > costs.saturates:
        instead = (
            "and wait for work. Larger batches give the coordinator less to do."
            if costs.bound == COORDINATOR
            else "only staler gradients."
        )
        notes.append(
            f"From {costs.saturates:.1f} workers on, this is saturated: {costs.bound}. More "
            f"workers bring no more rows a second, {instead}"
        )
    most = made.rule["max_staleness"]
    if most is not None and most < 2 * (made.workers - 1):
        notes.append(
            f"max_staleness={most} keeps workers waiting: {made.workers} of them all have work "
            f"from {2 * (made.workers - 1)} on."
        )
    if step.work.unknown:
        notes.append(
            f"{step.work.unknown} loops run an unknown number of times, and count as one turn: "
            "computing takes longer."
        )
    return tuple(notes)
