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
import numpy as np
from jax.extend.core import Literal

from stratagem.parameter_server.rows import ROWS
from stratagem.parameter_server.whole import WholeProgram
from stratagem.step import primitives
from stratagem.step.flatten import Equation, aval_of, flatten
from stratagem.step.flow import Flow, Home, is_elementwise
from stratagem.step.fuse import needed
from stratagem.step.given import CLOSURE, given_of, is_seed, own_seed, refuse_inner_given
from stratagem.step.ids import row_number_p
from stratagem.step.lower import perform
from stratagem.step.parts import Given, Parts, Push, Table, Unit
from stratagem.step.program import read_all, variables_of, write_all
from stratagem.step.ship import ship, symbols
from stratagem.step.tables import ByRow, NotByRowError
from stratagem.step.trace import Program
from stratagem.step.units import Update, uid_of, updates

_log = logging.getLogger("stratagem")
_warned: set[str] = set()
_MEGABYTE = 1e6


def divide(program: Program, homes: Callable[[Any], Home], local: Sequence[Any] = ()) -> Parts:
    """Divides a step between a worker and the parameter servers.

    Only rows that a closure looked up are updated in variables that are pulled by row, weight
    decay and the slots of optimizers included; see `Parts`.

    Args:
        program: traced under a strategy with `served`, its gradients resolved.
        homes: where a variable lives; not called for those in `local`.
        local: variables whose values the caller passes and gets back (metrics), in this order.

    Raises:
        ValueError: an update is not elementwise and its variable is sharded; or the step calls
            back into Python.
    """
    return _Division(program, homes, local).parts()


class _Division:
    def __init__(self, program: Program, homes: Callable[[Any], Home], local: Sequence[Any]):
        self.program = program
        self.local = list(local)
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
        self.lent = [position.get(id(v)) for v in self.local]
        self.returned = [None if i is None else new.get(i, self.flow.state[i]) for i in self.lent]
        written = {i: atom for i, atom in new.items() if self.homes[i] is not None}
        self.updates = updates(self.flow, written)
        # Variable, whether its first element alone, table whose rows it shall have.
        self.handed: dict[tuple[Any, bool, int | None], int] = {}  # in order, with its number
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

    def parts(self) -> Parts:
        flow = self.flow
        returned = [a for a in self.returned if a is not None]
        wanted = [*self.results, *returned, *(h.var for u in self.updates for h in u.handed)]
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
        tables = tuple(self._table(by_row, t, number_of) for t in by_row.tables)
        units = [self._unit(u) for u in self.updates]
        pushes = tuple(
            self._push(u, unit, table, by_row)
            for u, unit, table in zip(self.updates, units, by_row.pushed, strict=True)
        )
        return Parts(
            whole=tuple(self._vid(i) for i in whole),
            tables=tables,
            given=tuple(g for g, _ in given),
            local=len(self.local),
            results=len(self.results),
            pushes=pushes,
            units=tuple(units),
            ids=self._ship_ids(numbers, given) if tables else b"",
            compute=self._ship_compute(whole, by_row, given),
            out_tree=self.program.out_tree,
            out_leaves=self.program.out_leaves,
        )

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
            ([h.var for h in u.handed if not h.first and h.kind == ROWS], u.members)
            for u in self.updates
        ]
        scalars = [h.var for u in self.updates for h in u.handed if h.first or h.kind != ROWS]
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

    def _table(self, by_row: ByRow, index: int, number_of: dict[Any, int]) -> Table:
        aval = self.flow.state[index].aval
        lookups = by_row.lookups[index]
        return Table(
            self._vid(index),
            self.variables[index].path,
            aval.shape[0],
            tuple(aval.shape[1:]),
            str(aval.dtype),
            tuple(number_of[k.ids] for k in lookups),
            tuple(k.clip for k in lookups),
            self._servers(index),
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

        return ship(run, [_spec(v.aval) for v in inputs])

    def _push(self, update: Update, unit: Unit, table: int | None, by_row: ByRow) -> Push:
        handed = []
        for h in update.handed:
            rows = h.kind == ROWS and not h.first and h.var not in by_row.values
            key = h.var, h.first, table if rows else None
            handed.append((h.kind, self.handed.setdefault(key, len(self.handed))))
        return Push(unit.uid, None if table is None else by_row.tables.index(table), tuple(handed))

    # The worker's programs.

    def _arguments(self) -> Sequence[Any]:
        return self.flow.jaxpr.invars[len(self.variables) :]

    def _ship_ids(self, numbers: Sequence[Any], given: Sequence[tuple[Given, list[Any]]]) -> bytes:
        flow = self.flow
        eqns = needed(flow.eqns, numbers, effects=False)
        # Ids of tables without a preset size go to the worker as they are.
        operands = {
            v: flow.producer[v].invars[0]
            for v in numbers
            if v in flow.producer and flow.producer[v].primitive is row_number_p
        }

        def run(*args: Any) -> list[Any]:
            env = dict(flow.consts)
            taken = iter(args)
            write_all(env, self._arguments(), [next(taken) for _ in self._arguments()])
            for _, binders in given:
                value = next(taken)
                env.update(dict.fromkeys(binders, value))
            for eqn in eqns:
                if eqn.primitive not in (primitives.given_p, row_number_p):
                    write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
            found = read_all(env, [operands.get(v, v) for v in numbers])
            return [x if v in operands else x[..., 0] for v, x in zip(numbers, found, strict=True)]

        return ship(run, self._inputs(given))

    def _inputs(self, given: Sequence[tuple[Given, list[Any]]]) -> list[Any]:
        arguments = [_spec(v.aval) for v in self._arguments()]
        return arguments + [jax.ShapeDtypeStruct(g.shape, np.dtype(g.dtype)) for g, _ in given]

    def _ship_compute(
        self, whole: Sequence[int], by_row: ByRow, given: Sequence[tuple[Given, list[Any]]]
    ) -> bytes:
        flow, tables = self.flow, by_row.tables
        keys = [(t, k.ids) for t in tables for k in by_row.lookups[t]]
        dims = symbols(len(tables))
        lent_spec = [jax.ShapeDtypeStruct(tuple(v.shape), jnp.dtype(v._dtype)) for v in self.local]
        inputs = [
            *(_spec(flow.state[i].aval) for i in whole),
            *(
                jax.ShapeDtypeStruct((u, *flow.state[t].aval.shape[1:]), flow.state[t].aval.dtype)
                for t, u in zip(tables, dims, strict=True)
            ),
            *(jax.ShapeDtypeStruct(ids.aval.shape[:-1], jnp.int32) for _, ids in keys),
            *self._inputs(given),
            *lent_spec,
        ]

        def run(*args: Any) -> list[Any]:
            taken = iter(args)
            env = dict(flow.consts)
            write_all(env, [flow.state[i] for i in whole], [next(taken) for _ in whole])
            rows = {t: next(taken) for t in tables}
            positions = {key: next(taken)[..., None] for key in keys}
            write_all(env, self._arguments(), [next(taken) for _ in self._arguments()])
            closure: Any = None
            for g, binders in given:
                value = next(taken)
                closure = value if g.kind == CLOSURE else closure
                env.update(dict.fromkeys(binders, value))
            lent = list(taken)
            for i, value in zip(self.lent, lent, strict=True):
                if i is not None:
                    env[flow.state[i]] = value
            for i in whole:
                if is_seed(self.variables[i]):
                    env[flow.state[i]] = own_seed(env[flow.state[i]], closure)
            by_row.run(env, rows, positions)
            returned = [
                value if atom is None else read_all(env, [atom])[0]
                for atom, value in zip(self.returned, lent, strict=True)
            ]
            results = [
                _as(v, a) for v, a in zip(read_all(env, self.results), self.results, strict=True)
            ]
            returned = [jnp.asarray(v, s.dtype) for v, s in zip(returned, lent_spec, strict=True)]
            handed = [
                _first(env[v], first) if t is None else by_row.along(v, env, rows[t].shape[0])
                for v, first, t in self.handed
            ]
            return [*results, *returned, *handed]

        return ship(run, inputs)


def _first(value: Any, first: bool) -> Any:
    return jnp.ravel(value)[0] if first else value


def _as(value: Any, atom: Any) -> Any:
    return jnp.asarray(value, aval_of(atom).dtype) if isinstance(atom, Literal) else value


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


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
