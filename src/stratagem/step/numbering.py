"""Which values of several traces are the same value: global value numbering.

Two values get one number when they are the same operation on values of the same numbers. (Alpern,
Wegman and Zadeck, "Detecting equality of variables in programs", POPL 1988.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from stratagem.step.fuse import schedule
from stratagem.step.invariance import varying
from stratagem.step.program import inline
from stratagem.step.trace import Program

Table = dict[Any, int]  # the numbers given out so far, by what they stand for


class Numbered:
    """One trace, its values numbered; traces that share a table can be compared.

    Args:
        program: the trace.
        inputs_vary: which of its inputs differ between replicas.
        table: shared by the traces of one step.
    """

    def __init__(self, program: Program, inputs_vary: Sequence[bool], table: Table):
        self.closed = inline(program.jaxpr)
        self.jaxpr = self.closed.jaxpr
        self.levels = schedule(self.jaxpr)
        self._table = table
        # An equation runs in one place, with all that it gives.
        vary = varying(self.jaxpr, inputs_vary, whole=True)
        self.number: dict[Any, int] = {}
        for i, v in enumerate(self.jaxpr.invars):
            self.number[v] = self._new("input", i)
        for v, const in zip(self.jaxpr.constvars, self.closed.consts, strict=True):
            self.number[v] = self._new("const", _array_key(const))
        for depth, level in enumerate(self.levels):
            for eqn in level.eqns:
                operands = [self.of(v) for v in eqn.invars]
                # What a function on the host does cannot be read; each is one of a kind.
                own = "callback" in eqn.primitive.name
                parameters = object() if own else _key(eqn.params)
                for i, v in enumerate(eqn.outvars):
                    self.number[v] = self._new(
                        eqn.primitive.name, i, str(v.aval), *operands, parameters
                    )
            outs = [*level.totals, *(v for eqn in level.gathers for v in eqn.outvars)]
            for i, v in enumerate(outs):
                self.number[v] = self._new("collective", depth, i)
        self.invariant = {n for v, n in self.number.items() if not vary[v]}

    def of(self, atom: Any) -> int:
        """The number of a variable or a literal."""
        if isinstance(atom, Literal):
            return self._new("literal", str(atom.aval), _array_key(atom.val))
        return self.number[atom]

    def _new(self, *what: Any) -> int:
        return self._table.setdefault(what, len(self._table))


def _array_key(array: Any) -> Any:
    what = str(getattr(array, "dtype", ""))
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    value = np.asarray(array)
    content = value.tobytes() if value.nbytes < 1024 else hashlib.sha256(value.tobytes()).digest()
    return (what, value.shape, str(value.dtype), content)


def _key(params: Any) -> Any:
    """What two equations' parameters must have in common: programs count by text and constants."""
    if isinstance(params, dict):
        return tuple((k, _key(v)) for k, v in sorted(params.items()))
    if isinstance(params, (tuple, list)):
        return tuple(_key(v) for v in params)
    if isinstance(params, ClosedJaxpr):
        return (str(params.jaxpr), *map(_array_key, params.consts), *_inner(params.jaxpr))
    if isinstance(params, Jaxpr):
        return (str(params), *_inner(params))
    if isinstance(params, (np.ndarray, jax.Array)):
        return _array_key(params)
    if callable(params):  # rules of differentiation: the program beside them says what they do
        return getattr(params, "__qualname__", type(params).__qualname__)
    return repr(params)


def _inner(jaxpr: Jaxpr) -> list[Any]:
    """Constants of the programs inside a program, which its text leaves out."""
    return [_key(inner) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)]
