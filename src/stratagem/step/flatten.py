"""A program without calls: what nested functions compute stands at the top level, once.

Branches of an update (`cond` on values that depend on gradients, or on scalars alone, such as
counters of steps) become selections, so that a server can make them element by element. A slice of
one row becomes a lookup (`single_rows.py`). Equal equations are computed once (value numbering:
Cocke, SIGPLAN Notices 5(7), 1970), so that two uses of the same row numbers are seen as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from stratagem.step import primitives
from stratagem.step.program import bind
from stratagem.step.single_rows import as_lookup, is_zeros

Equation = Any  # a JaxprEqn between arrays, whose shapes JAX's types do not declare


def aval_of(atom: Any) -> Any:
    """Shape and dtype of a variable or a literal of a program."""
    return atom.aval


# Calls, with the parameter that holds their body.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls, and branches of the update, in place of where they were made."""

    def program(*args: Any) -> list[Any]:
        flat = _Flattener()
        outs, _ = flat.run(closed, args, [False] * len(args))
        return outs

    return jax.make_jaxpr(program)(*closed.in_avals)


class _Flattener:
    """Emits equations into the current trace, each once.

    Beside each value goes whether it depends on a gradient that has arrived.
    """

    def __init__(self) -> None:
        self._made: dict[Any, list[Any]] = {}
        self._alive: list[Any] = []  # ids are keys: what they are of must stay
        self._numbers: dict[Any, Any] = {}

    def run(
        self, body: Any, args: Sequence[Any], arrived: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        jaxpr = getattr(body, "jaxpr", body)
        consts = getattr(body, "consts", ())
        env: dict[Any, tuple[Any, bool]] = {
            v: (c, False) for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env.update(zip(jaxpr.invars, zip(args, arrived, strict=True), strict=True))

        zeros = {eqn.outvars[0] for eqn in jaxpr.eqns if is_zeros(eqn)}

        def read(atom: Any) -> tuple[Any, bool]:
            return (atom.val, False) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            pairs = [read(v) for v in eqn.invars]
            values, flags = [p[0] for p in pairs], [p[1] for p in pairs]
            name = eqn.primitive.name
            if name in _CALLS and _CALLS[name] in eqn.params:
                outs, late = self.run(eqn.params[_CALLS[name]], values, flags)
            elif name == "cond" and not eqn.effects and (any(flags) or _is_of_scalars(eqn)):
                outs, late = self._branches(eqn, values, flags)
            else:
                outs = as_lookup(eqn, values, zeros, self._number) or self._once(eqn, values)
                late = [any(flags) or is_arrival(eqn)] * len(outs)
            env.update(zip(eqn.outvars, zip(outs, late, strict=True), strict=True))
        found = [read(v) for v in jaxpr.outvars]
        return [p[0] for p in found], [p[1] for p in found]

    def _branches(
        self, eqn: Equation, values: list[Any], flags: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        index, operands = values[0], values[1:]
        each = [self.run(b, operands, flags[1:]) for b in eqn.params["branches"]]
        outs, late = each[0]
        late = [any(flags) or any(ls) for ls in zip(*(ls for _, ls in each), strict=True)]
        for number, (found, _) in enumerate(each[1:], start=1):
            outs = [
                old if old is new else jax.lax.select_n(jnp.equal(index, number), old, new)
                for old, new in zip(outs, found, strict=True)
            ]
        return outs, late

    def _once(self, eqn: Equation, values: list[Any]) -> list[Any]:
        if eqn.effects:
            return bind(eqn, values)
        operands = tuple(self._name(v) for v in values)
        key = (eqn.primitive, operands, tuple(sorted(eqn.params.items(), key=lambda kv: kv[0])))
        try:
            known = self._made.get(key)
        except TypeError:  # a parameter that cannot be compared
            return bind(eqn, values)
        if known is None:
            known = self._made[key] = bind(eqn, values)
            self._alive.extend([*values, *known])
        return known

    def _number(self, index: Any) -> Any:
        """A row number `[1]`, one for each index."""
        key = self._name(index)
        if key not in self._numbers:
            self._numbers[key] = jnp.reshape(index, (1,))
            self._alive.append(index)
        return self._numbers[key]

    def _name(self, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer) or np.ndim(value):
            return id(value)
        return (
            np.asarray(value).tobytes(),
            str(value.dtype) if hasattr(value, "dtype") else type(value),
            getattr(value, "weak_type", None),
        )


def _is_of_scalars(eqn: Equation) -> bool:
    return all(aval_of(v).shape == () for v in [*eqn.invars, *eqn.outvars])


def is_arrival(eqn: Equation) -> bool:
    """True for the equation that names a gradient, or what is added to a variable."""
    return eqn.primitive is primitives.mark_p and eqn.params["kind"] == "arrived"
