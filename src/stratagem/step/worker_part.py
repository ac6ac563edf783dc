"""The worker's part of a step, exported: which rows it needs, and what it computes with them.

See `Parts` for the order of inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from stratagem.step import primitives
from stratagem.step.by_lookup import ByLookup
from stratagem.step.flatten import aval_of
from stratagem.step.flow import Flow
from stratagem.step.fuse import needed
from stratagem.step.given import CLOSURE, is_seed, own_seed
from stratagem.step.ids import row_number_p
from stratagem.step.lower import perform
from stratagem.step.parts import Given
from stratagem.step.program import read_all, write_all
from stratagem.step.ship import ship, spec_of, symbols
from stratagem.step.tables import ByRow


@dataclasses.dataclass(frozen=True)
class WorkerPart:
    """What the programs are made of.

    Attributes:
        flow: of the whole program.
        variables: of it.
        given: what the worker puts in, and the values of the program that it stands for.
        by_row: the tables.
        by_lookup: those of them whose rows the compute program does not take.
    """

    flow: Flow
    variables: Sequence[Any]
    given: Sequence[tuple[Given, list[Any]]]
    by_row: ByRow
    by_lookup: ByLookup

    def ship_ids(self, numbers: Sequence[Any]) -> bytes:
        """The program of some row numbers."""
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
            write_all(env, self._arguments, [next(taken) for _ in self._arguments])
            for _, binders in self.given:
                value = next(taken)
                env.update(dict.fromkeys(binders, value))
            for eqn in eqns:
                if eqn.primitive not in (primitives.given_p, row_number_p):
                    write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
            found = read_all(env, [operands.get(v, v) for v in numbers])
            return [x if v in operands else x[..., 0] for v, x in zip(numbers, found, strict=True)]

        return ship(run, self._inputs())

    def ship_compute(
        self, whole: Sequence[int], results: Sequence[Any], local: Sequence[Local],
        handed: Sequence[tuple[Any, bool, int | None]],
    ) -> bytes:  # fmt: skip
        """The program of everything else.

        Args:
            whole: positions of the variables that are pulled whole.
            results: of the step.
            local: what the caller passes and gets back.
            handed: values for updates; whether the first element alone; the table whose rows it
                shall have.
        """
        flow, by_row, by_lookup = self.flow, self.by_row, self.by_lookup
        tables = [t for t in by_row.tables if t not in by_lookup.tables]
        keys = [(t, k.ids) for t in by_row.tables for k in by_row.lookups[t]]
        rows_of = zip(tables, symbols(len(tables)), strict=True)
        inputs = [
            *(spec_of(flow.state[i].aval) for i in whole),
            *(_rows_spec(flow.state[t].aval, (u,)) for t, u in rows_of),
            *(self._lookup_spec(t, ids) for t, ids in keys),
            *self._inputs(),
            *(one.spec for one in local),
        ]

        def run(*args: Any) -> list[Any]:
            taken = iter(args)
            env = dict(flow.consts)
            write_all(env, [flow.state[i] for i in whole], [next(taken) for _ in whole])
            rows = {t: next(taken) for t in tables}
            looked_up = {key: next(taken) for key in keys}
            positions = {k: v[..., None] for k, v in looked_up.items() if k[0] in rows}
            env.update((v, looked_up[key]) for v, key in by_lookup.looked_up.items())
            write_all(env, self._arguments, [next(taken) for _ in self._arguments])
            closure: Any = None
            for g, binders in self.given:
                value = next(taken)
                closure = value if g.kind == CLOSURE else closure
                env.update(dict.fromkeys(binders, value))
            lent = list(taken)
            for one, value in zip(local, lent, strict=True):
                if one.position is not None:
                    env[flow.state[one.position]] = value
            for i in whole:
                if is_seed(self.variables[i]):
                    env[flow.state[i]] = own_seed(env[flow.state[i]], closure)
            by_row.run(env, rows, positions, by_lookup.left)
            returned = [
                jnp.asarray(value if one.new is None else read_all(env, [one.new])[0], one.dtype)
                for one, value in zip(local, lent, strict=True)
            ]
            ready = [_as(v, a) for v, a in zip(read_all(env, results), results, strict=True)]
            pushed = [
                _first(env[v], first) if t is None else by_row.along(v, env, rows[t].shape[0])
                for v, first, t in handed
            ]
            return [*ready, *returned, *pushed]

        return ship(run, inputs)

    @property
    def _arguments(self) -> Sequence[Any]:
        return self.flow.jaxpr.invars[len(self.variables) :]

    def _inputs(self) -> list[Any]:
        arguments = [spec_of(v.aval) for v in self._arguments]
        return arguments + [jax.ShapeDtypeStruct(g.shape, np.dtype(g.dtype)) for g, _ in self.given]

    def _lookup_spec(self, table: int, ids: Any) -> jax.ShapeDtypeStruct:
        shape = ids.aval.shape[:-1]
        if table in self.by_lookup.tables:
            shape = shape[: len(shape) - self.by_lookup.bags.get((table, ids), 0)]
            return _rows_spec(self.flow.state[table].aval, shape)
        return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Local:
    """A variable that the caller passes and gets back.

    Attributes:
        shape: of it.
        dtype: of it.
        position: among the program's variables; None where the step has nothing to do with it.
        new: what it becomes; None: it stays as it is.
    """

    shape: tuple[int, ...]
    dtype: Any
    position: int | None
    new: Any

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """What JAX calls it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def _first(value: Any, first: bool) -> Any:
    return jnp.ravel(value)[0] if first else value


def _as(value: Any, atom: Any) -> Any:
    return jnp.asarray(value, aval_of(atom).dtype) if isinstance(atom, Literal) else value


def _rows_spec(aval: Any, count: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
    """Rows of a table."""
    return jax.ShapeDtypeStruct((*count, *aval.shape[1:]), aval.dtype)
