"""A program becomes parts for parameter servers, where the state and its update are elsewhere.

Workers pull what they read, compute results and what the update needs, and push that. Servers
apply it: each unit's update by itself, in the order in which pushes come.

`divide` 1. flattens the program (step/flatten.py), 2. finds the units and their updates
(step/units.py), 3. finds which variables can be pulled by row (step/tables.py), and 4. exports
the worker's part (step/ship.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.parameter_server.rows import ROWS
from stratagem.parameter_server.whole import WholeProgram
from stratagem.step import norms, primitives
from stratagem.step.by_lookup import ByLookup
from stratagem.step.flatten import Equation, flatten
from stratagem.step.flow import Flow, Home, is_elementwise
from stratagem.step.fuse import needed
from stratagem.step.given import given_of, is_seed, refuse_inner_given
from stratagem.step.ids import row_number_p
from stratagem.step.linear import not_linear
from stratagem.step.lower import perform
from stratagem.step.norms import Norms
from stratagem.step.parts import Parts, Push, Sum, Table, Unit
from stratagem.step.program import read_all, variables_of, write_all
from stratagem.step.ship import ship, spec_of
from stratagem.step.tables import ByRow, NotByRowError
from stratagem.step.trace import Program
from stratagem.step.units import Handed, Update, uid_of, updates
from stratagem.step.worker_part import Local, WorkerPart

_log = logging.getLogger("stratagem")
_warned: set[str] = set()
_MEGABYTE = 1e6


def divide(
    program: Program, homes: Callable[[Any], Home], local: Sequence[Any] = (),
    by_lookup: bool | None = None, in_rounds: bool = False,
) -> Parts:  # fmt: skip
    """Divides a step between a worker and the parameter servers.

    Only rows that a closure looked up are updated in variables that are pulled by row, weight
    decay and the slots of optimizers included; see `Parts`.

    Args:
        program: traced under a strategy with `served`, its gradients resolved.
        homes: where a variable lives; not called for those in `local`.
        local: variables whose values the caller passes and gets back (metrics), in this order.
        by_lookup: whether the worker looks rows up beside its program where it can; None: on CPU.
            Where accelerators compute, rows go there once, however many lookups got them.
        in_rounds: whether all its gradients wait for the end of a round, whose norms are known
            then; see `norms`.

    Raises:
        ValueError: an update is not elementwise and its variable is sharded; or the step calls
            back into Python.
    """
    if by_lookup is None:
        by_lookup = jax.default_backend() == "cpu"
    return _Division(program, homes, local, in_rounds).parts(by_lookup)


class _Division:
    def __init__(
        self, program: Program, homes: Callable[[Any], Home], local: Sequence[Any], in_rounds: bool
    ):
        self.program = program
        own = {id(v) for v in local}
        self.variables = program.variables
        self.homes = [None if id(v) in own else homes(v) for v in self.variables]
        self.closed = flatten(program.jaxpr)
        refuse_inner_given(self.closed.jaxpr)
        self.flow = Flow(self.closed, self.homes)
        outs = self.flow.jaxpr.outvars
        self.results = outs[: program.num_outputs]
        self.new = new = dict(zip(program.written, outs[program.num_outputs :], strict=True))
        position = {id(v): i for i, v in enumerate(self.variables)}
        places = [position.get(id(v)) for v in local]
        self.local = [
            Local(
                tuple(v.shape), jnp.dtype(v._dtype), i,
                None if i is None else new.get(i, self.flow.state[i]),
            )
            for v, i in zip(local, places, strict=True)
        ]  # fmt: skip
        written = {i: atom for i, atom in new.items() if self.homes[i] is not None}
        self.norms = norms.Found(self.flow)
        self.flow.numbers = self.norms if in_rounds else ()
        self.updates = updates(self.flow, written)
        if in_rounds and not self._has_their_gradients():
            self.flow.numbers = ()
            self.updates = updates(self.flow, written)
        # Variable, whether its first element alone, table whose rows it shall have.
        self.handed: dict[tuple[Any, bool, int | None], int] = {}  # in order, with its number
        self.sums: dict[tuple[Any, int], Sum] = {}  # in order
        self._refuse_sharded()

    def _refuse_sharded(self) -> None:
        for update in self.updates:
            home = self.homes[update.members[0]]
            if update.rows is None and home is not None and home.sharded:
                names = [self.variables[i].path for i in update.members]
                culprit = next(e for e in update.eqns if not is_elementwise(e))
                raise ValueError(
                    f"Expected an update of {names[0]!r} that changes each element by itself, "
                    "since its rows are on several parameter servers. Got "
                    f"{culprit.primitive.name!r} over the whole of it, in the update of "
                    f"{', '.join(names)}. Use an optimizer without norms of weights, and no "
                    "constraint over whole weights, or a partitioner that leaves it on one server."
                )

    def _has_their_gradients(self) -> bool:
        """Whether the servers get each gradient whose norm an update needs, as it arrived."""
        handed = {h.var for u in self.updates for h in u.handed}
        sums = self.norms.sums_of([v for v in handed if v in self.norms])
        return handed.issuperset(self.norms.gradients[v] for v in sums)

    def _norms(self, units: Sequence[Unit]) -> Norms | None:
        """What the coordinator computes at the end of a round."""
        numbers: dict[Any, list[norms.Place]] = {}
        handed: dict[Any, norms.Place] = {}
        for update, unit in zip(self.updates, units, strict=True):
            for place, h in enumerate(update.handed):
                handed.setdefault(h.var, (unit.uid, place))
                if h.var in self.flow.numbers:
                    numbers.setdefault(h.var, []).append((unit.uid, place))
        return norms.norms_of(self.norms, numbers, handed) if numbers else None

    def parts(self, by_lookup: bool) -> Parts:
        flow = self.flow
        returned = [one.new for one in self.local if one.new is not None]
        wanted = [*self.results, *returned, *(h.var for u in self.updates for h in self._own(u))]
        eqns = needed(flow.eqns, wanted)
        read = {v for e in eqns for v in variables_of(e.invars)} | set(variables_of(wanted))
        put_in = (primitives.given_p, row_number_p)
        made = [e for e in eqns if e.primitive not in put_in]
        by_row = self._by_row(made, returned)
        pulled = [i for i, v in enumerate(flow.state) if v in read and self.homes[i] is not None]
        whole = [i for i in pulled if i not in by_row.tables]
        for i in whole:
            self._refuse_dynamic(i, "the step reads all of it")
        given = given_of(eqns, any(is_seed(self.variables[i]) for i in pulled))
        lookups = [(t, k) for t in by_row.tables for k in by_row.lookups[t]]
        numbers = list(dict.fromkeys(k.ids for _, k in lookups))
        number_of = {v: i for i, v in enumerate(numbers)}
        found = self._by_lookup(by_row, by_lookup)
        worker = WorkerPart(flow, self.variables, given, by_row, found)
        tables = tuple(self._table(worker, t, number_of) for t in by_row.tables)
        units = [self._unit(u) for u in self.updates]
        pushes = tuple(
            self._push(u, unit, table, worker)
            for u, unit, table in zip(self.updates, units, by_row.pushed, strict=True)
        )
        return Parts(
            whole=tuple(self._vid(i) for i in whole),
            tables=tables,
            given=tuple(g for g, _ in given),
            local=len(self.local),
            results=len(self.results),
            sums=tuple(self.sums.values()),
            pushes=pushes,
            units=tuple(units),
            ids=worker.ship_ids(numbers) if tables else b"",
            compute=worker.ship_compute(whole, self.results, self.local, list(self.handed)),
            by_part=self._by_part(units),
            norms=self._norms(units),
            totals=self._totals(units),
            out_tree=self.program.out_tree,
            out_leaves=self.program.out_leaves,
        )

    def _by_part(self, units: Sequence[Unit]) -> list[tuple[str, str, str]]:
        found = not_linear(self.flow)
        return [
            (unit.uid, self.variables[update.members[0]].path, why)
            for update, unit in zip(self.updates, units, strict=True)
            for why in [found[h.var] for h in self._own(update) if h.var in found][:1]
        ]

    def _totals(self, units: Sequence[Unit]) -> list[norms.Place]:
        """What is added to variables whose aggregation is a sum."""
        return [
            (unit.uid, place)
            for update, unit in zip(self.updates, units, strict=True)
            if all(self.variables[i].aggregation == "sum" for i in update.members)
            for place, h in enumerate(update.handed)
            if h.var in self.flow.met
        ]

    def _own(self, update: Update) -> list[Handed]:
        """What a worker computes of what an update is handed."""
        return [h for h in update.handed if h.var not in self.flow.numbers]

    def _vid(self, index: int) -> int:
        home = self.homes[index]
        if home is None:
            raise ValueError(f"Expected a variable of the servers. Got {self.variables[index]}.")
        return home.vid

    # Tables.

    def _by_row(self, eqns: Sequence[Equation], returned: Sequence[Any]) -> ByRow:
        flow = self.flow
        looked_up = {
            v for e in eqns if e.primitive.name == "gather" for v in variables_of(e.invars[:1])
        }
        sources = _sources(flow, looked_up)
        tables = [
            i
            for i, v in enumerate(flow.state)
            if self.homes[i] is not None and v in sources and v.aval.shape[:1]
        ]
        handed = [
            ([h.var for h in self._own(u) if not h.first and h.kind == ROWS], u.members)
            for u in self.updates
        ]
        scalars = [h.var for u in self.updates for h in self._own(u) if h.first or h.kind != ROWS]
        for u in self.updates:
            names = [self.variables[i].path for i in u.members]
            if any("gradient_accumulator" in name for name in names):
                for t in [t for t in tables if t in u.members]:
                    tables.remove(t)
                    self._warn(t, "its optimizer accumulates gradients over steps")
        while True:
            wanted = [*self.results, *returned, *scalars]
            try:
                found = ByRow(flow, eqns, tables, wanted, handed)
            except NotByRowError as error:
                tables.remove(error.table)
                self._warn(error.table, error.why)
                continue
            unused = [t for t in tables if not found.lookups[t]]
            if not unused:
                return found
            tables = [t for t in tables if t not in unused]

    def _by_lookup(self, by_row: ByRow, wish: bool) -> ByLookup:
        wanted = []
        refused = set() if wish else set(by_row.tables)
        for update, table in zip(self.updates, by_row.pushed, strict=True):
            if table is None:
                continue
            for h in update.handed:
                if h.var in by_row.values and not h.first:
                    wanted.append((h.var, table))
                elif h.kind == ROWS or h.var in by_row.values:
                    refused.add(table)
        return ByLookup(self.flow, by_row, wanted, refused)

    def _warn(self, index: int, why: str) -> None:
        variable = self.variables[index]
        self._refuse_dynamic(index, why)
        if variable.path in _warned:
            return
        _warned.add(variable.path)
        aval = self.flow.state[index].aval
        _log.warning(
            "%r (%.1f MB) is looked up by row, but every closure pulls all of it and pushes all of "
            "its gradient: %s. Use it only through lookups (Embedding, ops.take) in the step.",
            variable.path,
            aval.size * aval.dtype.itemsize / _MEGABYTE,
            why,
        )

    def _table(self, worker: WorkerPart, index: int, number_of: dict[Any, int]) -> Table:
        aval = self.flow.state[index].aval
        lookups = worker.by_row.lookups[index]
        bags = [worker.by_lookup.bags.get((index, k.ids), 0) for k in lookups]
        return Table(
            self._vid(index),
            self.variables[index].path,
            aval.shape[0],
            tuple(aval.shape[1:]),
            str(aval.dtype),
            tuple(number_of[k.ids] for k in lookups),
            tuple(k.clip for k in lookups),
            tuple(k.from_end for k in lookups),
            self._servers(index),
            index in worker.by_lookup.tables,
            tuple(bags) if any(bags) else (),
        )

    def _refuse_dynamic(self, index: int, why: str) -> None:
        """Raises ValueError for a table without a preset size that would be pulled whole."""
        if self._servers(index):
            raise ValueError(
                f"Expected the rows of {self.variables[index].path!r}, a dynamic table, to be "
                f"looked up and their gradients to reach its optimizer alone. Got another use: "
                f"{why}. Call the DynamicTable layer for rows, and regularize those."
            )

    def _servers(self, index: int) -> int:
        """Of a table without a preset size, on how many servers it is."""
        home = self.homes[index]
        return 0 if home is None else home.servers

    # Units and pushes.

    def _unit(self, update: Update) -> Unit:
        vids = [self._vid(i) for i in update.members]
        if update.rows is not None:
            data = update.rows.to_wire()
            content = repr(data).encode()
            numbers = [h.var for h in update.handed if h.var in self.flow.numbers]
            if numbers:  # of the same update with another bound, as a norm's
                content += self.norms.program(numbers)[1].encode()
        else:
            content = self._ship_update(update)
            count = len(update.handed)
            written = tuple(update.written)
            data = WholeProgram(len(vids), ("whole",) * count, written, content).to_wire()
        return Unit(uid_of(vids, update.written, content), tuple(vids), data)

    def _ship_update(self, update: Update) -> bytes:
        flow = self.flow
        inputs = [*(flow.state[i] for i in update.members), *(h.var for h in update.handed)]
        wanted = [
            self.new[i] for i, writes in zip(update.members, update.written, strict=True) if writes
        ]

        def run(*args: Any) -> list[Any]:
            env = dict(flow.consts)
            write_all(env, inputs, args)
            for eqn in update.eqns:
                write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
            return [
                jnp.asarray(v, a.aval.dtype)
                for v, a in zip(read_all(env, wanted), wanted, strict=True)
            ]

        return ship(run, [spec_of(v.aval) for v in inputs])

    def _push(self, update: Update, unit: Unit, table: int | None, worker: WorkerPart) -> Push:
        handed = []
        by_row = worker.by_row
        for h in update.handed:
            if h.var in self.flow.numbers:
                handed.append(("number", 0))
                continue
            if table is not None and (h.var, table) in worker.by_lookup.totals:
                handed.append(("sum", self._sum(h.var, table, worker)))
                continue
            rows = h.kind == ROWS and not h.first and h.var not in by_row.values
            handed.append((h.kind, self._number(h.var, h.first, table if rows else None)))
        return Push(unit.uid, None if table is None else by_row.tables.index(table), tuple(handed))

    def _number(self, v: Any, first: bool = False, table: int | None = None) -> int:
        """That of a value which the worker's program returns for updates."""
        return self.handed.setdefault((v, first, table), len(self.handed))

    def _sum(self, v: Any, table: int, worker: WorkerPart) -> int:
        """That of a sum."""
        if (v, table) not in self.sums:
            ids = [k.ids for k in worker.by_row.lookups[table]]
            terms = [(self._number(g), ids.index(i)) for g, i in worker.by_lookup.totals[v, table]]
            self.sums[v, table] = Sum(worker.by_row.tables.index(table), tuple(terms))
        return list(self.sums).index((v, table))


def _sources(flow: Flow, values: set[Any]) -> set[Any]:
    """What some values are computed from element by element."""
    found = set(values)
    waiting = list(values)
    while waiting:
        eqn = flow.producer.get(waiting.pop())
        if eqn is not None and is_elementwise(eqn):
            new = [v for v in variables_of(eqn.invars) if v not in found]
            found.update(new)
            waiting.extend(new)
    return found
