"""A row program: how the rows of some variables change, as data that a server executes itself.

All arrays of a unit (a weight and its slots) have one shape, and each element of the new values
depends on that element of the old ones alone. So one program serves a whole variable, a shard of
it, or a few of its rows, and it needs neither JAX nor the user's code. It is computed in chunks
that stay in the processor's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from stratagem.parameter_server.axpy import Axpy
from stratagem.parameter_server.elementwise import DTYPES, OPERATIONS

SCALAR = "scalar"
ROWS = "rows"
_CHUNK = 65_536  # elements: few calls of NumPy, and arrays that fit into the second-level cache
_SMALL = 4096  # elements: an array of fewer is made anew as fast as one is found
_MAX_SIZE = 10_000  # operations and values that a program from the wire may have


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number that stands in a program."""

    value: Any
    dtype: str

    @property
    def scalar(self) -> Any:
        """The number as a NumPy scalar of its dtype."""
        return DTYPES[self.dtype].type(self.value)


Operand = int | Literal  # a number of a value: members, then handed ones, then results


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program: a name of `elementwise.OPERATIONS`, and what it takes."""

    name: str
    operands: tuple[Operand, ...]
    parameter: Any = None


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """An elementwise update of a unit's arrays. Use it in one thread at a time.

    Attributes:
        members: arrays of the unit.
        handed: kind of each value that comes from outside: "scalar" (shape `()`) or "rows" (the
            members' shape, or that of the touched rows).
        steps: operations, in order.
        outputs: for each member its new value, None where it is only read.
    """

    members: int
    handed: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Operand | None, ...]
    _dtypes: dict[Any, list[Any]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def run(self, state: Sequence[np.ndarray], handed: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The members' new values, as new arrays; a member that is only read is returned as it is.

        Raises:
            ValueError: arrays of other shapes or numbers than the program's.
        """
        self._check(state, handed)
        new = [
            value if out is None else value.copy()
            for value, out in zip(state, self.outputs, strict=True)
        ]
        self.update(new, handed)
        return new

    def update(self, state: Sequence[np.ndarray], handed: Sequence[np.ndarray]) -> None:
        """Changes the members in place.

        Args:
            state: C-contiguous arrays of one shape `[rows, ...]`, or scalars of shape `()`.
            handed: as `handed` says; "rows" like the state.

        Raises:
            ValueError: arrays of other shapes or numbers than the program's.
        """
        self._check(state, handed)
        values = [
            _flat(h) if k == ROWS else h[()] for h, k in zip(handed, self.handed, strict=True)
        ]
        memo = self._dtypes.setdefault(
            tuple(v.dtype for v in (*state, *values)), [None] * len(self.steps)
        )
        scratch = _Scratch(memo)
        flat = [_flat(member) for member in state]
        with np.errstate(all="ignore"):
            for start in range(0, flat[0].size, _CHUNK):
                part = slice(start, start + _CHUNK)
                chunk = [member[part] for member in flat]
                self._chunk(chunk, self._cut(values, part), scratch)

    def _cut(self, values: Sequence[Any], part: slice) -> list[Any]:
        return [v[part] if k == ROWS else v for v, k in zip(values, self.handed, strict=True)]

    def _check(self, state: Sequence[np.ndarray], handed: Sequence[np.ndarray]) -> None:
        if len(state) != self.members or len(handed) != len(self.handed):
            raise ValueError(
                f"Expected {self.members} arrays of state and {len(self.handed)} handed values. "
                f"Got {len(state)} and {len(handed)}. Push to the unit what its program takes."
            )
        shape = state[0].shape
        found = [m.shape for m in state]
        found += [h.shape for h in handed]
        wanted = [shape] * len(state) + [shape if k == ROWS else () for k in self.handed]
        if found != wanted:
            raise ValueError(
                f"Expected state and handed values of shapes {wanted}. Got {found}. Push values "
                "that were computed for these rows."
            )

    def _chunk(self, state: list[np.ndarray], handed: list[Any], scratch: _Scratch) -> None:
        """Updates one chunk; `state` are arrays `[elements]` that are overwritten."""
        values: list[Any] = [*state, *handed, *self._plan.literals]
        for number, (run, operands, ends, target) in enumerate(self._plan.steps):
            taken = [values[o] for o in operands]
            size = max(t.size if t.ndim else 0 for t in taken)
            out = None
            if target is not None and size and state[target].dtype == scratch.dtype(number):
                out = state[target]
            elif size:
                out = scratch.take(number, size)
            result = run(out, *taken)
            scratch.note(number, result)
            values.append(result)
            for dead in ends:
                scratch.give(values[dead])
        new: list[Any] = [None if o is None else values[o] for o in self._plan.outputs]
        # All are computed before any is stored: one may be another's old value.
        olds = {id(member) for member in state}
        for i, (member, value) in enumerate(zip(state, new, strict=True)):
            if value is not member and id(value) in olds:
                new[i] = value.copy()
        for member, value in zip(state, new, strict=True):
            if value is not None and value is not member:
                np.copyto(member, value)
        for value in new:
            scratch.give(value)

    @functools.cached_property
    def axpy(self) -> Axpy | None:
        """A shorter way to do the same to some rows, if there is one."""
        return Axpy.of(self)

    @functools.cached_property
    def _plan(self) -> _Plan:
        return _Plan.of(self)

    def to_wire(self) -> dict[str, Any]:
        """The program as plain data."""
        return {
            "kind": "rows",
            "members": self.members,
            "handed": list(self.handed),
            "steps": [[s.name, [_wire(o) for o in s.operands], s.parameter] for s in self.steps],
            "outputs": [_wire(o) for o in self.outputs],
        }

    @classmethod
    def from_wire(cls, data: Any) -> RowProgram:
        """The program of plain data that another process sent.

        Raises:
            ValueError: it is no program: unknown operations, wrong numbers of operands, values
                that are used before they are there.
        """
        fields = _mapping(data, {"kind", "members", "handed", "steps", "outputs"})
        members = _number(fields["members"], 1, _MAX_SIZE)
        handed = tuple(_list(fields["handed"]))
        if any(kind not in (SCALAR, ROWS) for kind in handed):
            raise _refused(f"handed values of kinds {handed!r}")
        count = members + len(handed)
        steps = []
        for item in _list(fields["steps"]):
            steps.append(_step(item, count))
            count += 1
        outputs = tuple(None if o is None else _operand(o, count) for o in _list(fields["outputs"]))
        if len(outputs) != members:
            raise _refused(f"{len(outputs)} outputs for {members} members")
        return cls(members, handed, tuple(steps), outputs)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A program with its numbers resolved: members, handed values, literals, results.

    Attributes:
        literals: NumPy scalars.
        steps: what to call, numbers of the operands, results that nothing needs afterwards, and
            the member that the result may overwrite.
        outputs: numbers of the outputs.
    """

    literals: list[Any]
    steps: list[tuple[Any, list[int], list[int], int | None]]
    outputs: list[int | None]

    @classmethod
    def of(cls, program: RowProgram) -> _Plan:
        given = program.members + len(program.handed)
        used = [o for s in program.steps for o in s.operands]
        used += [o for o in program.outputs if o is not None]
        literals = {id(o): o for o in used if isinstance(o, Literal)}
        position = {key: given + i for i, key in enumerate(literals)}
        first = given + len(literals)  # of the results

        def number(operand: Operand) -> int:
            if isinstance(operand, Literal):
                return position[id(operand)]
            return operand if operand < given else operand + len(literals)

        outputs = [None if o is None else number(o) for o in program.outputs]
        last: dict[int, int] = {}
        calls = []
        for i, step in enumerate(program.steps):
            operation = OPERATIONS[step.name]
            run = operation.run
            if operation.parameter is not None:
                run = functools.partial(run, **{operation.parameter: step.parameter})
            calls.append((run, [number(o) for o in step.operands]))
            last.update(dict.fromkeys([*calls[-1][1], first + i], i))
        ends: list[list[int]] = [[] for _ in calls]
        for value, i in last.items():
            if value >= first and value not in outputs:
                ends[i].append(value)
        targets: list[int | None] = [None] * len(calls)
        for member, new in enumerate(outputs):
            if new is None or new < first or outputs.count(new) > 1 or member in outputs:
                continue
            made = new - first
            later = any(member in operands for _, operands in calls[made + 1 :])
            if OPERATIONS[program.steps[made].name].in_place and not later:
                targets[made] = member
        steps = [
            (*call, dead, target) for call, dead, target in zip(calls, ends, targets, strict=True)
        ]
        return cls([o.scalar for o in literals.values()], steps, outputs)


class _Scratch:
    """Arrays for results within a chunk, used again as soon as nothing needs what they hold.

    All programs share those that are free, so that there are few, however many programs there are.
    """

    _free: ClassVar[dict[Any, list[np.ndarray]]] = {}

    def __init__(self, dtypes: list[Any]):
        self._dtypes = dtypes  # of each step's result, once it is known
        self._lent: dict[int, np.ndarray] = {}

    def dtype(self, number: int) -> Any:
        """Of the result of a step; None where it is not known yet."""
        return self._dtypes[number]

    def take(self, number: int, size: int) -> np.ndarray | None:
        """An array for the result of a step; None where its dtype is not known yet."""
        dtype = self._dtypes[number]
        if dtype is None or size < _SMALL:
            return None
        free = self._free.setdefault(dtype, [])
        base = None
        with contextlib.suppress(IndexError):  # another thread may have had the last one
            base = free.pop()
        if base is None or base.size < size:
            base = np.empty(max(size, _CHUNK), dtype)
        lent = base[:size]
        self._lent[id(lent)] = base
        return lent

    def note(self, number: int, result: Any) -> None:
        """Remembers the dtype of a step's result."""
        if self._dtypes[number] is None:
            self._dtypes[number] = result.dtype

    def give(self, value: Any) -> None:
        """Takes an array back, if it is one of these."""
        base = self._lent.pop(id(value), None)
        if base is not None:
            self._free[base.dtype].append(base)


def _flat(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError(
            "Expected C-contiguous arrays. Got one with gaps or in another order. Pass "
            "np.ascontiguousarray(array)."
        )
    return array.reshape(-1)


def _wire(operand: Operand | None) -> Any:
    return [operand.dtype, operand.value] if isinstance(operand, Literal) else operand


def _step(item: Any, count: int) -> Step:
    if not isinstance(item, (list, tuple)) or len(item) != 3:
        raise _refused(f"a step {item!r}")
    name, operands, parameter = item
    operation = OPERATIONS.get(name) if isinstance(name, str) else None
    if operation is None:
        raise _refused(f"an unknown operation {name!r}")
    operands = tuple(_operand(o, count) for o in _list(operands))
    if len(operands) != operation.operands:
        raise _refused(f"{len(operands)} operands of {name!r}")
    kind = str if operation.parameter == "dtype" else int
    if operation.parameter is None:
        fits = parameter is None
    else:
        fits = type(parameter) is kind and operation.valid(parameter)
    if not fits:
        raise _refused(f"parameter {parameter!r} of {name!r}")
    return Step(name, operands, parameter)


def _operand(item: Any, count: int) -> Operand:
    if type(item) is int:
        return _number(item, 0, count - 1)
    if isinstance(item, (list, tuple)) and len(item) == 2:
        dtype, value = item
        if isinstance(dtype, str) and dtype in DTYPES and type(value) in (bool, int, float):
            literal = Literal(value, dtype)
            try:
                literal.scalar  # noqa: B018
            except (OverflowError, ValueError, TypeError):
                raise _refused(f"the number {item!r}") from None
            return literal
    raise _refused(f"an operand {item!r}")


def _mapping(data: Any, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict) or set(data) != names:
        raise _refused(f"{data!r:.100}")
    return data


def _list(data: Any) -> Sequence[Any]:
    if not isinstance(data, (list, tuple)) or len(data) > _MAX_SIZE:
        raise _refused(f"{data!r:.100}")
    return data


def _number(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _refused(f"a number {value!r}, not one from {low} to {high}")
    return value


def _refused(got: str) -> ValueError:
    return ValueError(
        f"Expected a row program. Got {got}. Use the same version of Stratagem in all tasks."
    )
