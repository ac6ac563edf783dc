"""Which variables a worker pulls by row, and what it computes on rows instead of whole arrays.

A table is a variable that the worker's part reads only by gathering whole rows, with row numbers
that depend on arguments alone. Its gradient is zero but at those rows. Both are kept as arrays of
the rows that were pulled, `[u, ...]`; what is known of the other rows is one number, or nothing.
(As the sparse gradients of TensorFlow, `tf.IndexedSlices`, but found in the program.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from stratagem.step.flatten import Equation, aval_of, is_arrival
from stratagem.step.flow import Flow, is_elementwise
from stratagem.step.lower import perform
from stratagem.step.owners import Owners
from stratagem.step.program import read_all, variables_of, write_all
from stratagem.step.row_equations import (
    counts_from_end,
    gather,
    gathers_rows,
    keeps_rows,
    scatter,
    scatters_rows,
)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Row numbers `[..., 1]` that some gathers of a table use.

    Attributes:
        ids: variable of the flattened program.
        clip: numbers outside of the table mean its first or last row; else they are an error.
        from_end: negative numbers counted from the end: the number of rows has been added to them.
    """

    ids: Any
    clip: bool
    from_end: bool


@dataclasses.dataclass(frozen=True)
class RowValue:
    """A value that is kept by row.

    Attributes:
        elsewhere: each element of the rows that were not pulled, a NumPy scalar; None: unknown.
    """

    elsewhere: Any


class NotByRowError(Exception):
    """The worker needs more of a table than some rows; `table` says of which."""

    def __init__(self, table: int, why: str):
        super().__init__(why)
        self.table = table
        self.why = why


# What does not change the result of a reduction.
_NEUTRAL: Mapping[str, float] = {"reduce_sum": 0, "reduce_and": True, "reduce_or": False}


class ByRow:
    """The worker's part of a program, with some variables as rows.

    Args:
        flow: of the program.
        eqns: of the worker's part, in order.
        tables: positions of the variables that may be pulled by row.
        wanted: values that must be whole: results.
        handed: for each unit its values of kind "rows", and its members.

    Raises:
        NotByRowError: one of the tables cannot.
    """

    def __init__(
        self, flow: Flow, eqns: Sequence[Equation], tables: Sequence[int],
        wanted: Sequence[Any], handed: Sequence[tuple[Sequence[Any], Sequence[int]]],
    ):  # fmt: skip
        self.flow = flow
        self.eqns = eqns
        self.tables = list(tables)
        self.lookups: dict[int, list[Lookup]] = {t: [] for t in tables}
        self.values = {flow.state[t]: RowValue(None) for t in tables}
        self._owner = Owners()
        for t in tables:
            self._owner.add(flow.state[t], frozenset([t]))
        self._free = _without_state(flow)
        self._meant = self._of_units(handed)
        for eqn in eqns:
            self._note(eqn)
        for v in variables_of(wanted):
            if v in self.values:
                raise self._refusal(v, "the step returns it, or its whole gradient")
        self.pushed = [self._choose(values, members) for values, members in handed]

    def _refusal(self, v: Any, why: str) -> NotByRowError:
        return NotByRowError(self.table(v), why)

    def table(self, v: Any) -> int:
        """The table whose rows a value has."""
        return min(self._owner.of(v))

    def _of_units(
        self, handed: Sequence[tuple[Sequence[Any], Sequence[int]]]
    ) -> dict[Any, set[int]]:
        """For gradients of rows, the tables whose updates they reach element by element."""
        found: dict[Any, set[int]] = {}
        for values, members in handed:
            own = set(members) & set(self.tables)
            waiting = [v for v in values if own]
            while waiting:
                v = waiting.pop()
                known = found.setdefault(v, set())
                eqn = self.flow.producer.get(v)
                if own <= known or eqn is None:
                    continue
                known |= own
                if _by_element(eqn):
                    waiting.extend(u for u in variables_of(eqn.invars) if u.aval.shape)
        return found

    def _known(self, atom: Any) -> RowValue | None:
        return None if isinstance(atom, Literal) else self.values.get(atom)

    # What each equation does to what is known.

    def _note(self, eqn: Equation) -> None:
        known = [self._known(v) for v in eqn.invars]
        out: Any = eqn.outvars[0] if eqn.outvars else None
        if all(k is None for k in known):
            if eqn.primitive.name == "scatter-add" and self._is_zero(eqn.invars[0]):
                owners = self._owners(eqn)
                if owners:
                    self.values[out] = RowValue(np.zeros((), out.aval.dtype)[()])
                    self._owner.add(out, owners)
            return
        of = [v for v, k in zip(eqn.invars, known, strict=True) if k is not None]
        value = self._through(eqn, known)
        if value is None:
            raise self._refusal(of[0], f"{eqn.primitive.name!r} needs all of its rows")
        if isinstance(value, RowValue):
            scatters = eqn.primitive.name == "scatter-add"
            self.values[out] = value
            self._owner.add(out, self._owners(eqn) if scatters else self._owner.of(of[0]))
            self._join([out, *of])

    def _join(self, values: Sequence[Any]) -> None:
        for v in values[1:]:
            if not self._owner.join(values[0], v):
                raise self._refusal(v, "it meets the rows of another table")

    def _through(self, eqn: Equation, known: list[RowValue | None]) -> Any:
        """What is known of an equation's result: a RowValue, True for a whole one, else None."""
        name = eqn.primitive.name
        if name == "gather":
            return self._lookup(eqn, known)
        if name == "scatter-add":
            fits = known[0] is not None and not any(known[1:]) and known[0].elsewhere == 0
            return known[0] if fits and self._owners(eqn) else None
        if name in _NEUTRAL:
            return self._reduce(eqn, known[0])
        if name in ("broadcast_in_dim", "reshape") and not _by_element(eqn):
            return known[0] if keeps_rows(eqn) else None
        if not _by_element(eqn):
            return None
        rest = [v for v, k in zip(eqn.invars, known, strict=True) if k is None]
        if not all(self._is_along(v) for v in rest):
            return None
        return RowValue(self._elsewhere(eqn, known))

    def _lookup(self, eqn: Equation, known: list[RowValue | None]) -> Any:
        value, ids = known[0], eqn.invars[1]
        if value is None or known[1] is not None or len(self._owner.of(eqn.invars[0])) != 1:
            return None
        if not gathers_rows(eqn) or isinstance(ids, Literal) or ids not in self._free:
            return None
        table = self.table(eqn.invars[0])
        clip = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        lookup = Lookup(ids, clip, counts_from_end(ids, self.flow.producer))
        if lookup not in self.lookups[table]:
            self.lookups[table].append(lookup)
        return True

    def _owners(self, eqn: Equation) -> frozenset[int]:
        """The tables whose rows a scatter-add may go to."""
        shape = eqn.outvars[0].aval.shape
        if not scatters_rows(eqn):
            return frozenset()
        found = frozenset(
            t
            for t, lookups in self.lookups.items()
            if self.flow.state[t].aval.shape[:1] == shape[:1]
            and any(k.ids is eqn.invars[1] for k in lookups)
        )
        meant = self._meant.get(eqn.outvars[0], set())
        return found & meant or found

    def _reduce(self, eqn: Equation, value: RowValue | None) -> Any:
        neutral = _NEUTRAL[eqn.primitive.name]
        if value is None or value.elsewhere is None or value.elsewhere != neutral:
            return None
        dtype = eqn.outvars[0].aval.dtype
        whole = 0 in eqn.params["axes"]
        return True if whole else RowValue(np.asarray(neutral, dtype)[()])

    def _elsewhere(self, eqn: Equation, known: list[RowValue | None]) -> Any:
        """An elementwise operation on what the other rows hold."""
        name = eqn.primitive.name
        values = [
            self._constant(v) if k is None else k.elsewhere
            for v, k in zip(eqn.invars, known, strict=True)
        ]
        zero = np.zeros((), eqn.outvars[0].aval.dtype)[()]
        if name == "mul" and any(v is not None and v == 0 for v in values):
            return zero
        if name == "div" and values[0] is not None and values[0] == 0:
            return zero
        if name == "select_n" and None not in values[1:] and len(set(values[1:])) == 1:
            return values[1]
        if any(v is None for v in values):
            return None
        if name in ("broadcast_in_dim", "reshape", "mark"):
            return values[0]
        with jax.ensure_compile_time_eval():
            (out,) = perform(eqn, [jnp.asarray(v) for v in values])
        return np.asarray(out)[()]

    def _constant(self, atom: Any) -> Any:
        """The number that all elements of a value are, where the program says it."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val).astype(aval_of(atom).dtype)[()]
        eqn = self.flow.producer.get(atom)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            return self._constant(eqn.invars[0])
        return None

    def _is_zero(self, atom: Any) -> bool:
        value = self._constant(atom)
        return value is not None and value == 0

    def _is_along(self, atom: Any) -> bool:
        """True for a value whose rows are all equal, by how it is computed."""
        if isinstance(atom, Literal) or atom.aval.shape[:1] in ((), (1,)):
            return True
        eqn = self.flow.producer.get(atom)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            of, dims = aval_of(eqn.invars[0]).shape, eqn.params["broadcast_dimensions"]
            return 0 not in dims or of[dims.index(0)] == 1
        return _by_element(eqn) and all(self._is_along(v) for v in eqn.invars)

    # Which table's rows a value has, where several may be meant.

    def _choose(self, values: Sequence[Any], members: Sequence[int]) -> int | None:
        """The table whose rows a unit's values are of, None where they are whole."""
        found = [v for v in values if v in self.values]
        if not found:
            return None
        whole = [v for v in values if v not in self.values and not self._is_along(v)]
        if whole or any(self.values[v].elsewhere != 0 for v in found):
            raise self._refusal(found[0], "its update needs all of its rows")
        self._join(found)
        own = self._owner.of(found[0]) & set(members)
        if own:
            self._owner.choose(found[0], min(own))
        return self.table(found[0])

    # Running it.

    def run(
        self, env: dict[Any, Any], rows: Mapping[int, Any],
        positions: Mapping[tuple[int, Any], Any], left: Container[int] = (),
    ) -> None:  # fmt: skip
        """Computes the worker's part.

        Args:
            env: values of the program's inputs; those of all equations are added.
            rows: for each table the pulled rows `[u, ...]`.
            positions: for each table and lookup, where in those rows the row numbers are.
            left: identities of equations that are left out.
        """
        for t, value in rows.items():
            env[self.flow.state[t]] = value
        for eqn in self.eqns:
            if id(eqn) in left:
                continue
            name = eqn.primitive.name
            of = next((v for v in variables_of(eqn.invars) if v in self.values), None)
            out: Any = eqn.outvars[0] if eqn.outvars else None
            if of is None and (out is None or out not in self.values):
                write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
            elif name == "gather":
                where = positions[self.table(of), eqn.invars[1]]
                env[out] = gather(eqn, env[of], where)
            elif name == "scatter-add":
                table = self.table(out)
                updates = read_all(env, eqn.invars[2:])[0]
                zeros = jnp.zeros((rows[table].shape[0], *out.aval.shape[1:]), out.aval.dtype)
                start = zeros if of is None else env[of]
                env[out] = scatter(eqn, start, positions[table, eqn.invars[1]], updates)
            else:
                env[out] = self._on_rows(eqn, env, env[of].shape[0])

    def _on_rows(self, eqn: Equation, env: dict[Any, Any], count: Any) -> Any:
        values = [
            v.val if isinstance(v, Literal)
            else env[v] if v in self.values
            else self.along(v, env, count)
            for v in eqn.invars
        ]  # fmt: skip
        return _reshaped(eqn, values, count)

    def along(self, atom: Any, env: dict[Any, Any], count: Any) -> Any:
        """A value whose rows are all equal, with this many rows."""
        if isinstance(atom, Literal):
            return atom.val
        if atom.aval.shape[:1] in ((), (1,)):
            return env[atom]
        eqn = self.flow.producer[atom]
        if eqn.primitive.name == "broadcast_in_dim":
            return _reshaped(eqn, read_all(env, eqn.invars), count)
        return _reshaped(eqn, [self.along(v, env, count) for v in eqn.invars], count)


def _reshaped(eqn: Equation, values: Sequence[Any], count: Any) -> Any:
    """An equation with another number of rows."""
    name = eqn.primitive.name
    if name in ("broadcast_in_dim", "reshape"):
        shape = (count, *eqn.outvars[0].aval.shape[1:])
        if name == "reshape":
            return jnp.reshape(values[0], shape)
        return lax.broadcast_in_dim(values[0], shape, eqn.params["broadcast_dimensions"])
    return perform(eqn, values)[0]


def _without_state(flow: Flow) -> set[Any]:
    """Values that depend on no variable: on arguments and constants alone."""
    found = {*flow.jaxpr.constvars, *flow.jaxpr.invars[len(flow.state) :]}
    for eqn in flow.eqns:
        if not eqn.effects and all(v in found for v in variables_of(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _by_element(eqn: Equation) -> bool:
    return is_elementwise(eqn, loose=True) or is_arrival(eqn)
