"""Norms of gradients in a round: of the mean that the servers have, not of each worker's own.

An update may use numbers that are made of sums of squares of gradients as they arrived, and of
nothing else that varies: clipping by a norm does. In a round nobody has the mean of the gradients
of a variable whole. So servers give the sums of squares of what they have of it, the coordinator
adds these up and computes the numbers, and all servers apply the round with the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from stratagem.step import primitives
from stratagem.step.flatten import Equation, aval_of, is_arrival
from stratagem.step.flow import SAME, Flow
from stratagem.step.fuse import needed
from stratagem.step.lower import perform
from stratagem.step.program import read_all, variables_of, write_all

Place = tuple[str, int]  # a unit, and the place of a value among those it is handed


@dataclasses.dataclass(frozen=True)
class Norms:
    """Numbers of a round, and what they are made of.

    Attributes:
        squares: whose squares are summed.
        numbers: which places get one of the numbers, in the order of what `compute` gives.
        compute: the numbers, of the sums.
    """

    squares: tuple[Place, ...]
    numbers: tuple[Place, ...]
    compute: Callable[[Sequence[float]], list[np.ndarray]]


class Found:
    """The sums of squares in a program, and what is made of them alone.

    Args:
        flow: of a program whose gradients have arrived.

    Attributes:
        gradients: for each sum, whose squares it is of: the gradient as it arrived.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        self.gradients: dict[Any, Any] = {}
        self._made: set[Any] = set()
        self._constant = set(flow.consts)
        self._programs: dict[tuple[Any, ...], tuple[Any, str]] = {}
        for eqn in flow.eqns:
            of = set(variables_of(eqn.invars))
            if eqn.effects or eqn.primitive is primitives.given_p or len(eqn.outvars) != 1:
                continue
            if (gradient := _squared(flow, eqn)) is not None:
                self.gradients[eqn.outvars[0]] = gradient
                self._made.add(eqn.outvars[0])
            elif self._constant.issuperset(of):
                self._constant.add(eqn.outvars[0])
            elif of <= self._made | self._constant:
                self._made.add(eqn.outvars[0])

    def __contains__(self, v: Any) -> bool:
        """Whether a value is one number that is made of sums of squares alone."""
        return v in self._made and v.aval.size == 1

    def sums_of(self, numbers: Sequence[Any]) -> list[Any]:
        """The sums that some numbers are made of."""
        eqns = self._eqns(numbers)
        read = {*variables_of([v for e in eqns for v in e.invars]), *numbers}
        return [v for v in self.gradients if v in read]

    def program(self, numbers: Sequence[Any]) -> tuple[Any, str]:
        """What computes some numbers of their sums, and how that is written.

        Made once for the same numbers: the norm of all gradients is in the update of each variable.
        """
        if (key := tuple(numbers)) not in self._programs:
            self._programs[key] = self._program(numbers)
        return self._programs[key]

    def _program(self, numbers: Sequence[Any]) -> tuple[Any, str]:
        flow, eqns, sums = self._flow, self._eqns(numbers), self.sums_of(numbers)

        def run(*values: Any) -> list[Any]:
            env = dict(flow.consts)
            write_all(env, sums, values)
            for eqn in eqns:
                write_all(env, eqn.outvars, perform(eqn, read_all(env, eqn.invars)))
            return [jnp.reshape(v, ()) for v in read_all(env, numbers)]

        closed = jax.make_jaxpr(run)(*(v.aval for v in sums))
        return jax.jit(run), f"{closed} {[np.asarray(c).tolist() for c in closed.consts]}"

    def _eqns(self, numbers: Sequence[Any]) -> list[Equation]:
        known = self._made | self._constant
        made = [e for e in self._flow.eqns if e.outvars[0] in known]
        return needed([e for e in made if e.outvars[0] not in self.gradients], numbers)


def _squared(flow: Flow, eqn: Equation) -> Any:
    """The gradient, as it arrived, the sum of whose squares an equation gives; else None."""
    if eqn.primitive.name != "reduce_sum" or eqn.outvars[0].aval.shape != ():
        return None
    square = _maker(flow, eqn.invars[0])
    if square is None:
        return None
    name = square.primitive.name
    by_itself = name == "mul" and square.invars[0] is square.invars[1]
    if not (name == "square" or by_itself or (name == "integer_pow" and square.params["y"] == 2)):
        return None
    arrival = _maker(flow, square.invars[0])
    return arrival.outvars[0] if arrival is not None and is_arrival(arrival) else None


def _maker(flow: Flow, v: Any) -> Equation | None:
    """The equation that makes a value, before it is only shaped in another way."""
    while not isinstance(v, Literal) and (eqn := flow.producer.get(v)) is not None:
        if eqn.primitive.name not in SAME or is_arrival(eqn) or len(eqn.invars) != 1:
            return eqn
        if math.prod(aval_of(eqn.invars[0]).shape) != math.prod(v.aval.shape):
            return eqn
        v = eqn.invars[0]
    return None


def norms_of(found: Found, numbers: dict[Any, list[Place]], handed: dict[Any, Place]) -> Norms:
    """How the numbers of a program come about.

    Args:
        found: in the program.
        numbers: which values are needed, and where.
        handed: where gradients as they arrived are.
    """
    order = list(numbers)
    sums = found.sums_of(order)
    run, _ = found.program(order)
    dtypes = [v.aval.dtype for v in sums]

    def compute(totals: Sequence[float]) -> list[np.ndarray]:
        values = run(*(np.asarray(t, d) for t, d in zip(totals, dtypes, strict=True)))
        each = zip(order, values, strict=True)
        return [np.asarray(value) for v, value in each for _ in numbers[v]]

    squares = tuple(handed[found.gradients[v]] for v in sums)
    return Norms(squares, tuple(p for v in order for p in numbers[v]), compute)
