"""Runs a script up to its first step under planned parameter servers, and counts its parts.

    python -m stratagem.cli.plan_trace_servers WANTED SCRIPT [ARGUMENT ...]

`WANTED` is JSON, see `Wanted`. The step is cut as in a job (step/apart.py); what a worker would
compute is counted, and which rows it would look up is computed from the script's first batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stratagem.cli import plan_trace
from stratagem.coordinator import ClusterCoordinator
from stratagem.coordinator.per_worker import Elements, spec_of
from stratagem.coordinator.plans import Call, Plans
from stratagem.keras_bridge.served import ServedStep
from stratagem.parameter_server import cut
from stratagem.parameter_server.bags import fewer
from stratagem.parameter_server.plan import Spec
from stratagem.planning.program import Program
from stratagem.planning.served import SIZES, Load, Served, Table
from stratagem.step import apart, counting, worker_part
from stratagem.step.distinct import Distinct
from stratagem.step.parts import Parts
from stratagem.step.parts import Table as StepTable
from stratagem.strategies import PlannedServers
from stratagem.strategies.parameter_server import Consistency

_ID_BYTES, _PLACE_BYTES = 8, 4


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be traced.

    Args:
        out: file for the counts, as JSON; empty if the script ends without a step.
        workers: how many.
        servers: how many.
        rows: of each worker; 0 for what the script gives.
        table_rows: distinct rows of a step that the user knows, by table; under "" of all others.
        rule: of consistency, as fields of `Consistency`; None for the script's.
        module: the script is the name of a module.
    """

    out: str
    workers: int
    servers: int
    rows: int = 0
    table_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rule: Mapping[str, Any] | None = None
    module: bool = False


@dataclasses.dataclass
class Seen:
    """What is noted while the step is traced.

    Attributes:
        program: as it was traced.
        shipped: functions that would be sent, with their inputs; the last is the worker's part.
        elements: the first element of each per-worker iterator, by its number: the leaves.
        given: rows that the script's batch has; 0 where nothing says it.
        pooled: tables of which only sums are needed, by their numbers on the servers.
    """

    program: Any = None
    shipped: list[tuple[Callable[..., Any], Sequence[Any]]] = dataclasses.field(
        default_factory=list
    )
    elements: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    given: int = 0
    pooled: dict[int, StepTable] = dataclasses.field(default_factory=dict)


class Caught(BaseException):
    """Carries the first step out of the script, past all of its `except Exception`."""

    def __init__(self, what: str, call: Call):
        super().__init__(what)
        self.what, self.call = what, call


def main(arguments: Sequence[str]) -> int:
    """Runs the script; returns the exit code."""
    wanted = Wanted(**json.loads(arguments[0]))
    rule = None if wanted.rule is None else Consistency(**wanted.rule)
    planned, seen = PlannedServers.of(wanted.workers, wanted.servers, rule), Seen()
    asked: list[str] = []
    try:
        with replaced(planned, asked, seen, wanted.rows), planned.scope():
            plan_trace.run_script(arguments[1:], wanted.module)
    except Caught as caught:
        counted = count(caught, planned, asked, seen, wanted)
        followed = dataclasses.asdict(planned.consistency)
        Path(wanted.out).write_text(json.dumps({"served": counted.to_json(), "rule": followed}))
        return 0
    Path(wanted.out).write_text("")
    return 0


@contextlib.contextmanager
def replaced(
    planned: PlannedServers, asked: list[str], seen: Seen, rows: int = 0
) -> Iterator[None]:
    """In the body every strategy that is made is `planned`, and the first step raises `Caught`.

    Args:
        planned: the strategy.
        asked: gets the names of the classes that were to be made.
        seen: gets what is noted on the way.
        rows: of each worker; 0 for what the script gives.
    """
    find, divide, ship = Plans.find, apart.divide, worker_part.ship

    def catch(self: Plans, fn: Any, args: Any, kwargs: Any) -> Any:
        seen.given = seen.given or _rows((args, kwargs))
        raise Caught(_what(fn), find(self, fn, *_resized((args, kwargs), seen.given, rows)))

    def begin(self: Any, strategy: Any) -> None:
        self.strategy, self._plans = strategy, Plans(strategy)
        self._iterators = itertools.count(1)
        self.dispatcher = _Dispatcher(seen, rows)

    sends = True

    def note(program: Any, homes: Any, local: Any = (), **how: Any) -> Parts:
        nonlocal sends
        sends = False  # here it is only asked of which tables sums are enough
        tables = divide(program, homes, local, by_lookup=True, **how).tables
        sends = True
        seen.pooled = {t.vid: t for t in tables if t.bags and not t.servers}
        seen.program, seen.shipped = program, []
        # What a worker does beside its program is counted as if it were in it.
        return divide(program, homes, local, by_lookup=False, **how)

    def noted(function: Callable[..., Any], inputs: Sequence[Any]) -> bytes:
        if not sends:
            return b""
        seen.shipped.append((function, inputs))
        return ship(function, inputs)  # It says if it cannot be sent.

    with contextlib.ExitStack() as stack:
        stack.enter_context(plan_trace.replaced(planned, asked))
        for owner, name, new in (
            (Plans, "find", catch),
            (apart, "divide", note),
            (worker_part, "ship", noted),
            (ClusterCoordinator, "_begin", begin),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield


class _Dispatcher:
    """Stands for the connections to workers: opens datasets here, and runs nothing.

    Args:
        seen: gets their first elements.
        rows: of each worker; 0 for what the dataset gives.
    """

    def __init__(self, seen: Seen, rows: int):
        self._seen, self._planned = seen, rows
        self.let_go: list[int] = []

    def open_iterator(self, number: int, pickled: bytes, seconds: float) -> Any:
        first = Elements(pickled, 0).take()
        self._seen.given = self._seen.given or _rows(first)
        first = _resized(first, self._seen.given, self._planned)
        self._seen.elements[number] = first.leaves
        return spec_of(first)

    def ask(self, what: str) -> bool:
        return True

    def close(self) -> None:
        pass


def _what(fn: Any) -> str:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, ServedStep):
        return f"a {owner._kind} step of model {owner._model.name!r}"
    name = getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
    return f"scheduled function {name}"


def _rows(call: Any) -> int:
    """Rows of the first batched argument."""
    arrays = [x for x in jax.tree.leaves(call) if isinstance(x, (np.ndarray, jax.Array))]
    return next((len(x) for x in arrays if x.ndim), 0)


def _resized(call: Any, given: int, rows: int) -> Any:
    """As many rows as are planned: the batch's own, again and again."""
    if not rows or not given:
        return call

    def change(leaf: Any) -> Any:
        batched = isinstance(leaf, (np.ndarray, jax.Array)) and leaf.shape[:1] == (given,)
        return np.asarray(leaf)[np.arange(rows) % given] if batched else leaf

    return jax.tree.map(change, call)


# Counting.


def count(
    caught: Caught, planned: PlannedServers, asked: Sequence[str], seen: Seen, wanted: Wanted
) -> Served:
    """What is known of the step, from its parts."""
    (plan,) = caught.call.family.plans.values()
    parts, specs = plan.parts, planned.link.specs
    given = [_given(g, caught.call, seen) for g in parts.given]
    looked_up = _looked_up(parts, specs, [*caught.call.arrays, *given], seen, wanted)
    outputs, counted = _worker(parts, seen, [table for table, _ in looked_up])
    loads = _loads(parts, specs, looked_up, outputs[parts.results + parts.local :])
    written = {id(seen.program.variables[i]) for i in seen.program.written}
    rows = wanted.rows or seen.given
    back = sum(map(counting.size_of, outputs[: parts.results + parts.local]))
    work = Program(
        caught=caught.what,
        strategy=tuple(asked) or ("none",),
        replicas=1,
        rows=rows,
        rows_per_replica=rows,
        idle=0,
        state=round(sum(load.pulled for load in loads)),
        trainable=round(sum(load.pushed for load in loads)),
        arguments=sum(map(counting.size_of, [*caught.call.arrays, *given])),
        peak=counted.peak,
        operations=dict(counted.operations),
        bytes=counted.bytes,
        kernels=counted.kernels,
        reduces=(),
        writes=any(id(v) in written and v.trainable for v in seen.program.variables),
        unknown=counted.unknown,
    )
    return Served(
        work=work,
        servers=wanted.servers,
        loads=tuple(loads),
        tables=tuple(table for table, _ in looked_up),
        whole=tuple((specs[vid].name, specs[vid].nbytes) for vid in parts.whole),
        sent=sum(map(counting.size_of, caught.call.arrays)),
        returned=back,
        partitioner=planned.partitioner,
    )


def _given(given: Any, call: Call, seen: Seen) -> np.ndarray:
    """A value that a worker puts in: of its first element, else zero."""
    if given.kind == "element":
        position, _, leaf = given.key
        return seen.elements[call.iterators[position].number][leaf]
    return np.zeros(given.shape, given.dtype)


def _looked_up(
    parts: Parts, specs: Mapping[int, Spec], values: Sequence[Any], seen: Seen, wanted: Wanted
) -> list[tuple[Table, list[float]]]:
    """The tables, with the rows of a step on each of their shards."""
    if not parts.tables:
        return []
    run, _ = seen.shipped[-2]
    numbers = [np.asarray(v) for v in jax.jit(run)(*values)]
    found = []
    for table in parts.tables:
        spec = specs[table.vid]
        ids = np.concatenate([numbers[k].reshape(-1) for k in table.lookups]).astype(np.int64)
        if spec.dynamic is not None:  # any ids, evenly on all servers
            one = np.unique(ids)
            shares = [len(one) / len(spec.shards)] * len(spec.shards)
        else:
            one, _ = Distinct(table.rows).of(np.clip(ids, 0, table.rows - 1))
            shares = [0.0] * len(spec.shards)
            for index, start, stop in cut.by_shard(spec, one):
                shares[index] = float(stop - start)
        amount, known = len(one), "batch"
        said = wanted.table_rows.get(table.name, wanted.table_rows.get(""))
        if said is not None:
            amount, known = min(said, table.rows), "argument"
        elif wanted.rows > seen.given > 0:
            more = round(len(one) * wanted.rows / seen.given)
            amount, known = min(more, ids.size, table.rows), "estimate"
        shares = [share * amount / max(1, len(one)) for share in shares]
        size = 0 if spec.dynamic is not None else table.rows
        named = (table.name, size, spec.row_bytes, ids.size, amount, known)
        pooled = seen.pooled.get(table.vid)
        bags = 0 if pooled is None else sum(pooled.bags_of([numbers[k] for k in pooled.lookups]))
        travels = fewer(bags, amount, len(spec.shards))
        found.append((Table(*named, bags if travels else 0), shares))
    return found


def _worker(parts: Parts, seen: Seen, tables: Sequence[Table]) -> tuple[list[Any], Any]:
    """The worker's part with so many rows of each table: outputs, and what it counts."""
    run, symbolic = seen.shipped[-1]
    inputs = list(symbolic)
    for i, table in enumerate(tables, len(parts.whole)):
        spec = symbolic[i]
        inputs[i] = jax.ShapeDtypeStruct((table.distinct, *spec.shape[1:]), spec.dtype)
    closed = jax.make_jaxpr(run)(*inputs)
    return list(closed.out_avals), counting.count(closed, 1)


def _loads(
    parts: Parts,
    specs: Mapping[int, Spec],
    looked_up: Sequence[tuple[Table, list[float]]],
    handed: Sequence[Any],
) -> list[Load]:
    """What the step does with each shard of each variable and its slots."""
    tables = {t.vid: found for t, found in zip(parts.tables, looked_up, strict=True)}
    loads: dict[tuple[int, int], dict[str, float]] = {}
    for spec in specs.values():
        root = _root(spec)
        for index, shard in enumerate(spec.shards):
            load = loads.setdefault((root, index), dict.fromkeys(SIZES, 0.0))
            if spec.dynamic is None:  # else it grows, and nobody knows how far
                load["held"] += (shard.stop - shard.start) * spec.row_bytes
    for vid in parts.whole:
        for index, shard in enumerate(specs[vid].shards):
            loads[_root(specs[vid]), index]["pulled"] += (shard.stop - shard.start) * specs[
                vid
            ].row_bytes
    for vid, (table, shares) in tables.items():
        for index, rows in enumerate(shares):
            load = loads[_root(specs[vid]), index]
            mentions = _mentions(table, rows)
            load["pulled"] += (table.bags or rows) * table.row_bytes
            load["asked"] += rows * _ID_BYTES + mentions * _PLACE_BYTES
            load["rows"] += mentions or rows
    vids = {unit.uid: unit.vids for unit in parts.units}
    for push in parts.pushes:
        members = [specs[vid] for vid in vids[push.uid]]
        pulled, touched = (
            (None, None) if push.table is None else tables[parts.tables[push.table].vid]
        )
        for index, shard in enumerate(members[0].shards):
            rows = shard.stop - shard.start if touched is None else touched[index]
            load = loads[_root(members[0]), index]
            values = [(kind, _handed(kind, handed[k], rows)) for kind, k in push.handed]
            if pulled is not None and pulled.bags:
                load["summed"] += sum(size for kind, size in values if kind == "rows")
                sums = pulled.bags * pulled.row_bytes + _mentions(pulled, rows) * _PLACE_BYTES
                values = [(kind, sums if kind == "rows" else size) for kind, size in values]
            load["pushed"] += sum(size for _, size in values)
            load["updated"] += rows * sum(spec.row_bytes for spec in members)
            if touched is not None:
                load["pushed"] += rows * _ID_BYTES
                load["touched"] += rows
    return [
        Load(specs[root].name, specs[root].shards[i].server, specs[root].sharded, **sizes)
        for (root, i), sizes in loads.items()
    ]


def _mentions(table: Table, rows: float) -> float:
    """How often rows of a shard are named, where their places in bags travel; else 0."""
    return table.mentions * rows / max(1, table.distinct) if table.bags else 0.0


def _root(spec: Spec) -> int:
    """The variable beside which it is, or itself."""
    return spec.vid if spec.beside is None else spec.beside


def _handed(kind: str, value: Any, rows: float) -> float:
    """Bytes of a handed value for so many rows of a shard; others than rows go to each shard."""
    nbytes = counting.size_of(value)
    if kind != "rows" or not value.shape:
        return nbytes
    return nbytes / max(1, value.shape[0]) * rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
