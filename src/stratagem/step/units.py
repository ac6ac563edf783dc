"""Which variables change together, and what of their update their server computes.

A *unit* is a set of variables of one shape in one place whose new values depend on each other's
old ones element by element: a weight and its slots. Going back from a new value, an equation
belongs to the server when it depends on an old value of the unit, and not only through a gradient
that has arrived; the values where this ends are computed by the worker and handed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from stratagem.parameter_server import rows
from stratagem.step.flatten import Equation, aval_of, is_arrival
from stratagem.step.flow import (
    SAME,
    Flow,
    is_elementwise,
    is_uniform,
    parameter_of,
)
from stratagem.step.linear import is_linear
from stratagem.step.program import variables_of

Sets = Mapping[Any, frozenset[int]]
_NONE: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Handed:
    """A value that the worker computes for a unit: a variable of the program.

    Attributes:
        var: of the flattened program.
        kind: "scalar", "rows" or "whole".
        first: all its elements are equal, and the first is handed.
    """

    var: Any
    kind: str
    first: bool = False


@dataclasses.dataclass(frozen=True)
class Update:
    """A unit of one program.

    Attributes:
        members: positions of its variables in the program's, the written ones and those that
            only their update reads.
        written: for each, whether it gets a new value.
        handed: what the worker computes for it, in the order of the update's inputs.
        rows: the update, where it is elementwise.
        eqns: the equations of an update that is not, else empty.
    """

    members: list[int]
    written: list[bool]
    handed: list[Handed]
    rows: rows.RowProgram | None
    eqns: list[Equation]


def updates(flow: Flow, written: Mapping[int, Any]) -> list[Update]:
    """The units of a program.

    Args:
        flow: of the program.
        written: for each written variable its new value, an atom of the program.
    """
    written = {i: a for i, a in written.items() if a is not flow.state[i]}
    group = {i: i for i in written}

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    links = {i: _links(flow, i, atom) for i, atom in written.items()}
    for i, found in links.items():
        for j in found & written.keys():
            group[root(j)] = root(i)
    units: dict[int, list[int]] = {}
    for i in written:
        units.setdefault(root(i), []).append(i)
    return [
        _update(flow, sorted(own), {i: written[i] for i in own}, links) for own in units.values()
    ]


def _links(flow: Flow, index: int, atom: Any) -> frozenset[int]:
    if isinstance(atom, Literal):
        return _NONE
    place = flow.place(index)
    return frozenset(j for j in flow.alike[atom] if flow.place(j) == place)


def _update(flow: Flow, own: list[int], new: dict[int, Any], links: Mapping[int, Any]) -> Update:
    members = [*own, *sorted(set().union(*(links[i] for i in own)) - set(own))]
    state = {flow.state[i] for i in members}

    def cone(sets: Sets) -> tuple[list[Equation], list[Any]]:
        return _cone(flow, [new[i] for i in own], lambda v, _: bool(sets[v] & set(members)), state)

    eqns, ends = cone(flow.alike)
    if _needs_whole(flow, ends, frozenset(own)):
        eqns, ends = _from_gradients(flow, state, *cone(flow.reaching))
        return Update(
            members, [i in new for i in members], [Handed(v, "whole") for v in ends], None, eqns
        )
    eqns, ends = _fewer(flow, state, eqns, ends)
    return _elementwise(flow, members, new, eqns, ends)


def _needs_whole(flow: Flow, ends: Sequence[Any], own: frozenset[int]) -> bool:
    """True where something handed would have to be computed from what the update computes."""
    seen = set(ends)
    waiting = list(ends)
    while waiting:
        v = waiting.pop()
        eqn = flow.producer.get(v)
        if eqn is None or v in flow.data or not flow.reaching[v] & own:
            continue
        for u in variables_of(eqn.invars):
            if not is_elementwise(eqn) and u in flow.met and flow.reaching[u] & own:
                return True
            if u not in seen:
                seen.add(u)
                waiting.append(u)
    return False


def _cone(
    flow: Flow,
    atoms: Sequence[Any],
    inward: Callable[[Any, Equation], bool],
    state: Collection[Any] = (),
) -> tuple[list[Equation], list[Any]]:
    """The equations on the way to some values, and the values where that ends.

    Args:
        flow: of the program.
        atoms: what is computed.
        inward: whether the equation that makes a value belongs to them.
        state: values that are there already.
    """
    inside: dict[int, Equation] = {}
    ends: dict[Any, None] = {}
    waiting = variables_of(atoms)
    while waiting:
        v = waiting.pop()
        eqn = flow.producer.get(v)
        if v in state:
            continue
        if eqn is None or not inward(v, eqn):
            ends[v] = None
        elif id(eqn) not in inside:
            inside[id(eqn)] = eqn
            waiting.extend(variables_of(eqn.invars))
    eqns = sorted(inside.values(), key=lambda e: flow.order[id(e)])
    return eqns, sorted(ends, key=lambda v: _place(flow, v))


def _fewer(
    flow: Flow, state: set[Any], eqns: list[Equation], ends: list[Any]
) -> tuple[list[Equation], list[Any]]:
    """Lets the update compute what it can from other handed arrays, so that fewer are sent."""
    chosen = {id(e): e for e in eqns}
    made = {v for e in eqns for v in e.outvars} | state
    arrays = {v for v in ends if _is_array(flow, v)}
    rest = {v for v in ends if v not in arrays}
    while True:
        for v in sorted(arrays, key=lambda v: -_place(flow, v)):
            eqn = flow.producer.get(v)
            if eqn is None or not is_elementwise(eqn):
                continue
            needed = [u for u in variables_of(eqn.invars) if _is_array(flow, u)]
            if needed and all(u in made or u in arrays for u in needed):
                chosen[id(eqn)] = eqn
                made.add(v)
                arrays.remove(v)
                rest.update(u for u in variables_of(eqn.invars) if u not in needed)
                break
        else:
            break
    # From gradients as they arrived.
    deeper, back = _cone(
        flow, list(arrays), lambda v, e: v in flow.met and _is_array(flow, v) and is_elementwise(e)
    )
    if len([v for v in back if _is_array(flow, v)]) < len(arrays):
        chosen.update((id(e), e) for e in deeper)
        arrays = set(back)
    for v in [*arrays, *rest]:
        changes, source = _arrived(flow, v)
        chosen.update((id(e), e) for e in changes)
        of = arrays if v in arrays else rest
        of.remove(v)
        of.add(source)
        taken = {u for e in changes for u in variables_of(e.invars)}
        others = {u for u in taken if u not in flow.met or u in flow.numbers}
        rest.update(others - state)
    found = sorted({*arrays, *rest}, key=lambda v: _place(flow, v))
    return sorted(chosen.values(), key=lambda e: flow.order[id(e)]), found


def _from_gradients(
    flow: Flow, state: set[Any], eqns: list[Equation], ends: list[Any]
) -> tuple[list[Equation], list[Any]]:
    """Lets an update of whole variables begin with the gradient as it arrived.

    In a round, squares and norms are those of the mean then, as on one device.
    """
    chosen = {id(e): e for e in eqns}
    found: dict[Any, None] = {}
    for v in ends:
        deeper, back = _cone(flow, [v], lambda u, e: u in flow.met and not is_arrival(e), state)
        others = [u for u in back if u not in flow.met]
        if len(back) > len(others) + 1 or any(_is_array(flow, u) for u in others):
            deeper, back = [], [v]  # of several variables' gradients, as a norm of all is
        chosen.update((id(e), e) for e in deeper)
        found.update(dict.fromkeys(back))
    return (
        sorted(chosen.values(), key=lambda e: flow.order[id(e)]),
        sorted(found, key=lambda v: _place(flow, v)),
    )


def _arrived(flow: Flow, v: Any) -> tuple[list[Equation], Any]:
    """A gradient as it arrived, and what the server makes of it with numbers that all workers have.

    In a round that is done with the mean, as on one device. What is only multiplied stays with the
    worker, where XLA does it for nothing; but for gradients of rows, which the worker would have to
    take out of its memory again for that, while the server has them in its cache.
    """

    def is_met(u: Any) -> bool:
        return u in flow.met and u not in flow.numbers

    found, back = _cone(flow, [v], lambda u, e: is_met(u) and is_elementwise(e))
    met = [u for u in back if is_met(u)]
    others = [u for u in back if not is_met(u)]
    if len(met) != 1 or any(u in flow.data or _is_array(flow, u) for u in others):
        return [], v
    # Of what else is made of gradients, each worker has its own.
    source = met[0]
    eqn = flow.producer[source]
    own = [(e, [u for u in variables_of(e.invars) if is_met(u)]) for e in found]
    useful = _is_of_rows(flow, source) or any(u in flow.numbers for u in others)
    useful = useful or not all(is_linear(e, of) for e, of in own)
    return (found, source) if useful and (_is_array(flow, source) or is_arrival(eqn)) else ([], v)


def _is_of_rows(flow: Flow, v: Any) -> bool:
    """True for a gradient that was added up by row."""
    eqn = flow.producer.get(v)
    while eqn is not None and (eqn.primitive.name in SAME or eqn.primitive.name == "add_any"):
        operands = variables_of(eqn.invars)
        eqn = flow.producer.get(operands[0]) if operands else None
    return eqn is not None and eqn.primitive.name == "scatter-add"


def _is_array(flow: Flow, v: Any) -> bool:
    """True for a value that is handed as an array."""
    return v.aval.shape != () and not is_uniform(flow, v)


def _place(flow: Flow, v: Any) -> int:
    """Position of a value in the program; that of inputs is 0."""
    eqn = flow.producer.get(v)
    return 0 if eqn is None else 1 + flow.order[id(eqn)]


def _elementwise(
    flow: Flow, members: list[int], new: dict[int, Any], eqns: list[Equation], ends: list[Any]
) -> Update:
    shape = flow.state[members[0]].aval.shape
    values: dict[Any, rows.Operand] = {flow.state[i]: k for k, i in enumerate(members)}
    handed: list[Handed] = []
    for v in ends:
        literal, end = _simplest(flow, v, shape)
        if literal is not None:
            values[v] = literal
            continue
        if end not in handed:
            handed.append(end)
        values[v] = len(members) + handed.index(end)
    count = len(members) + len(handed)

    def operand(atom: Any) -> rows.Operand:
        if isinstance(atom, Literal):
            return literal_of(atom.val, aval_of(atom).dtype)
        return values[atom]

    steps = []
    for eqn in eqns:
        operands = tuple(operand(v) for v in eqn.invars)
        if eqn.primitive.name in SAME:
            values[eqn.outvars[0]] = operands[0]
            continue
        steps.append(rows.Step(eqn.primitive.name, operands, parameter_of(eqn)))
        values[eqn.outvars[0]] = count
        count += 1
    outputs = tuple(operand(new[i]) if i in new else None for i in members)
    program = rows.RowProgram(len(members), tuple(h.kind for h in handed), tuple(steps), outputs)
    return Update(members, [i in new for i in members], handed, program, [])


def literal_of(value: Any, dtype: Any) -> rows.Literal:
    """A number of a program as a row program writes it."""
    return rows.Literal(np.asarray(value).astype(dtype).item(), str(np.dtype(dtype)))


def _simplest(flow: Flow, v: Any, shape: Any) -> tuple[rows.Literal | None, Handed]:
    """How a value is handed: as a number of the program, a scalar, or an array."""
    source = v
    while (eqn := flow.producer.get(source)) is not None and eqn.primitive.name in SAME:
        if is_arrival(eqn) or len(eqn.invars) != 1:
            break
        atom = eqn.invars[0]
        if aval_of(atom).shape not in ((), aval_of(source).shape):
            break
        if isinstance(atom, Literal):
            return literal_of(atom.val, aval_of(atom).dtype), Handed(v, rows.SCALAR)
        source = atom
    if source.aval.shape == ():
        if source in flow.consts:
            value = np.asarray(flow.consts[source])
            return literal_of(value, source.aval.dtype), Handed(v, rows.SCALAR)
        return None, Handed(source, rows.SCALAR)
    if is_uniform(flow, source):
        return None, Handed(source, rows.SCALAR, first=True)
    return None, Handed(source, rows.ROWS)


def uid_of(vids: Sequence[int], written: Sequence[bool], program: bytes) -> str:
    """The name of a unit: equal for equal ones.

    Args:
        vids: its variables.
        written: for each, whether it gets a new value.
        program: of its update, and whatever else tells it from others.
    """
    content = repr((list(vids), list(written))).encode() + program
    return hashlib.sha256(content).hexdigest()[:24]
