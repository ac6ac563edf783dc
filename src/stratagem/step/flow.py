"""Where the values of a flattened program come from, and what is computed element by element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from stratagem.parameter_server.elementwise import DTYPES, OPERATIONS
from stratagem.step import primitives
from stratagem.step.flatten import Equation, is_arrival
from stratagem.step.fuse import live
from stratagem.step.program import variables_of

_NONE: frozenset[int] = frozenset()
# Operations that keep each element: they may also bring a scalar to the unit's shape.
SAME = {"mark", "copy", "copy_p", "broadcast_in_dim", "reshape", "stop_gradient"}
_TERNARY = 3
_KNOWN = frozenset(DTYPES.values())


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a variable lives.

    Attributes:
        vid: its number on the servers.
        where: equal for variables of equal shape whose rows are on the same servers.
        sharded: its rows are on several servers.
        servers: of a table without a preset size, on how many servers its ids are; else 0.
    """

    vid: int
    where: Hashable
    sharded: bool = False
    servers: int = 0


class Flow:
    """Where the values of a flattened program come from.

    Args:
        closed: flattened; inputs are the variables' values, then others.
        homes: of each variable; None for one whose value is an argument like others.

    Attributes:
        numbers: made of gradients, but known before an update begins; see `norms`.
    """

    def __init__(self, closed: ClosedJaxpr, homes: Sequence[Home | None]):
        self.jaxpr = closed.jaxpr
        self.homes = homes
        self.state = self.jaxpr.invars[: len(homes)]
        self.consts = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.eqns = live(self.jaxpr)
        self.producer = {v: e for e in self.eqns for v in e.outvars}
        self.order = {id(e): i for i, e in enumerate(self.eqns)}
        self.data = self._data()
        self.alike = self._follow(is_elementwise)
        # What depends on old values at all, but not through gradients or computations on data.
        self.reaching = self._follow(lambda eqn: is_elementwise(eqn) or not self._of_data(eqn))
        self.met = self._met()
        self.numbers: Container[Any] = ()

    def _of_data(self, eqn: Equation) -> bool:
        return any(v in self.data for v in variables_of(eqn.invars))

    def _data(self) -> set[Any]:
        """Values that depend on arguments, other than through a gradient that has arrived."""
        lent = [v for v, h in zip(self.state, self.homes, strict=True) if h is None]
        found = {*lent, *self.jaxpr.invars[len(self.state) :]}
        for eqn in self.eqns:
            if is_arrival(eqn):
                continue
            alone = eqn.primitive is primitives.given_p or eqn.effects
            if alone or any(v in found for v in variables_of(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _met(self) -> set[Any]:
        found: set[Any] = set()
        for eqn in self.eqns:
            if is_arrival(eqn) or any(v in found for v in variables_of(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _follow(self, through: Callable[[Equation], bool]) -> dict[Any, frozenset[int]]:
        """For each value the variables whose old values it depends on through some equations."""
        found: dict[Any, frozenset[int]] = dict.fromkeys(self.jaxpr.constvars, _NONE)
        found.update(dict.fromkeys(self.jaxpr.invars, _NONE))
        found.update(
            (v, frozenset([i]))
            for i, (v, home) in enumerate(zip(self.state, self.homes, strict=True))
            if home is not None
        )
        for eqn in self.eqns:
            of = _NONE
            if not is_arrival(eqn) and through(eqn):
                of = of.union(*(found[v] for v in variables_of(eqn.invars)))
            found.update(dict.fromkeys(eqn.outvars, of))
        return found

    def place(self, index: int) -> Any:
        """Equal for variables whose rows are in the same places."""
        home = self.homes[index]
        return self.state[index].aval.shape, home.where if home else None


def is_elementwise(eqn: Equation, loose: bool = False) -> bool:
    """True where each element of the result depends on that element of operands, and scalars.

    Args:
        eqn: of a flattened program.
        loose: an operand may also be one row, or one column, for all.
    """
    name = eqn.primitive.name
    if eqn.effects or len(eqn.outvars) != 1:
        return False
    out = eqn.outvars[0].aval
    shapes = [np.shape(v.val) if isinstance(v, Literal) else v.aval.shape for v in eqn.invars]
    dtypes = [v.aval.dtype for v in [*eqn.invars, eqn.outvars[0]]]
    if not all(_fits(s, out.shape, loose) for s in shapes) or not _KNOWN.issuperset(dtypes):
        return False
    if name in SAME:
        return len(shapes) == 1 and not is_arrival(eqn)
    if name not in OPERATIONS or len(shapes) != OPERATIONS[name].operands:
        return False
    if name == "select_n":
        return dtypes[0].name == "bool" and len(shapes) == _TERNARY
    operation = OPERATIONS[name]
    return operation.parameter is None or operation.valid(parameter_of(eqn))


def _fits(shape: tuple[int, ...], out: tuple[int, ...], loose: bool) -> bool:
    if shape in ((), out):
        return True
    same = len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out, strict=True))
    return same and (loose or math.prod(shape) == 1)


def parameter_of(eqn: Equation) -> Any:
    """The static parameter of an elementwise operation, as row programs write it."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return str(np.dtype(eqn.params["new_dtype"]))
    if name == "round":
        return int(eqn.params["rounding_method"])
    return eqn.params["y"] if name == "integer_pow" else None


def is_uniform(flow: Flow, atom: Any) -> bool:
    """True for a value whose elements are all equal, by how it is computed."""
    if isinstance(atom, Literal) or atom.aval.size == 1:
        return True
    eqn = flow.producer.get(atom)
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        return is_uniform(flow, eqn.invars[0])
    return eqn is not None and is_elementwise(eqn) and all(is_uniform(flow, v) for v in eqn.invars)
