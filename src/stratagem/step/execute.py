"""Calls of a traced step: find or make its compiled program, feed it, keep what it wrote."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import context, variables
from stratagem.step import effects, invariance, numerics, tape, uneven
from stratagem.step.arguments import Argument, describe, flatten, row_classes
from stratagem.step.lower import boundary, evaluate
from stratagem.step.trace import (
    NO_ROWS,
    Facts,
    LocalValue,
    Program,
    RowClass,
    Trace,
    trace,
)
from stratagem.values import IndexedSlices, PerReplica, check_count, is_distributed, is_whole

_log = logging.getLogger("stratagem")
_MANY_TRACES = 16


@dataclasses.dataclass(frozen=True)
class Fit:
    """A step of a Keras model, instead of one of `run`.

    Metrics enter and leave as their aggregate, gradients are averaged by rows, a replica without
    rows does not run the step.

    Attributes:
        rows: rows that each replica holds, `[replicas]`.
        rows_out: the step's results are rows (`predict`); else they are logs, averaged by rows
            where they differ between replicas.
    """

    rows: tuple[int, ...]
    rows_out: bool = False


class Compiled:
    """One compiled program and the variables it reads and writes."""

    def __init__(self, strategy: Any, program: Program, function: Any, described: list[Any],
                 programs: list[Program], members: tuple[int, ...]):  # fmt: skip
        self.program = program
        self.function = function
        self.dynamic = [i for i, d in enumerate(described) if isinstance(d, Argument)]
        self.arguments = [described[i] for i in self.dynamic]
        self._strategy = strategy
        self._one = strategy.num_replicas_in_sync == 1
        self._given = [program.variables[i] for i in program.written]
        written = set(program.written)
        self._kept = [v for i, v in enumerate(program.variables) if i not in written]
        split = not self._one and not program.aggregated
        # Variables, each with whether its value is in components.
        self._given_slots = [(v, split and variables.is_on_read(v)) for v in self._given]
        self._kept_slots = [(v, split and variables.is_on_read(v)) for v in self._kept]
        self._result_shapes = _result_shapes(programs, members)
        self._sparse = _has_slices(program.out_tree)
        self._checks = [programs[max(m, 0)].checks for m in members]
        # The default strategy owns no variable: what it writes goes back to where it belongs.
        self._foreign = context.is_default(strategy)

    def state(self) -> tuple[list[Any], list[Any]]:
        """The values of the donated and of the other variables."""
        given = [v.components if c else v._value for v, c in self._given_slots]
        return _own(given), [v.components if c else v._value for v, c in self._kept_slots]

    def apply(
        self, values: Sequence[Any], current: Callable[[Any], Any]
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """Runs one step on state that the caller keeps (`fit`); stores nothing.

        Args:
            values: the dynamic arguments.
            current: gives a variable's value; those that the step writes are destroyed.

        Returns:
            The function's result, and the new values of the written variables.
        """
        given, kept = [current(v) for v in self._given], [current(v) for v in self._kept]
        results, state = self.function(given, kept, self.pack(values))
        self.check(results)
        return self.unpack(results), list(zip(self._given, state, strict=True))

    def store(self, state: Sequence[Any]) -> None:
        """Gives the written variables their new values."""
        for (variable, component), value in zip(self._given_slots, state, strict=True):
            if component:
                variable.components = value
            elif self._foreign:
                variable._direct_assign(value)
            else:
                variable._value = value

    def pack(self, values: Sequence[Any]) -> list[Any]:
        """Arguments in the layout of the program's boundary."""
        return [
            self._stack(value, argument) if argument.split else self._strategy.place(value)
            for value, argument in zip(values, self.arguments, strict=True)
        ]

    def _stack(self, value: PerReplica, argument: Argument) -> Any:
        if self._one:
            return value.values[0]
        if (whole := value.stacked) is not None:
            return whole
        if jnp.issubdtype(argument.dtype, jax.dtypes.prng_key):
            keys = np.stack([np.asarray(jax.random.key_data(key)) for key in value.values])
            impl = jax.random.key_impl(value.values[0])
            return jax.random.wrap_key_data(self._strategy.place_stacked(keys), impl=impl)
        parts = [np.asarray(part) for part in value.values]
        stacked = np.zeros((len(parts), *argument.padded), argument.dtype)
        for r, part in enumerate(parts):
            window: tuple[Any, ...] = (r, *(slice(0, n) for n in part.shape))
            stacked[window] = part
        return self._strategy.place_stacked(stacked)

    def check(self, results: Sequence[Any]) -> None:
        """Looks at the flags of a program that has some, before anything is stored."""
        if self.program.checks:
            flags = np.asarray(results[-1])
            numerics.judge(flags.reshape(len(self._checks), -1), self._checks)

    def unpack(self, results: Sequence[Any]) -> Any:
        """The function's result, with PerReplica leaves where replicas may differ."""
        leaves = []
        position = 0
        tree = self.program.out_tree
        for kind, static in self.program.out_leaves[: tree.num_leaves]:
            if kind == "static":
                leaves.append(static)
                continue
            value = results[position]
            if kind == "local" and not self._one:
                value = _per_replica(value, self._result_shapes[position])
            leaves.append(value)
            position += 1
        result = jax.tree.unflatten(tree, leaves)
        if self._sparse and not self._one:
            return jax.tree.map(_whole, result, is_leaf=is_whole)
        return result


def _has_slices(tree: Any) -> bool:
    result = jax.tree.unflatten(tree, [None] * tree.num_leaves)
    return any(isinstance(x, IndexedSlices) for x in jax.tree.leaves(result, is_leaf=is_whole))


def _whole(leaf: Any) -> Any:
    """IndexedSlices of PerReplica values as the PerReplica of IndexedSlices that they are."""
    if not isinstance(leaf, IndexedSlices) or not isinstance(leaf.values, PerReplica):
        return leaf
    values = leaf.values.values
    same = (leaf.indices,) * len(values)
    indices = leaf.indices.values if isinstance(leaf.indices, PerReplica) else same
    pairs = zip(values, indices, strict=True)
    return PerReplica([IndexedSlices(v, i, leaf.dense_shape) for v, i in pairs])


def _own(values: list[Any]) -> list[Any]:
    """Copies the values that someone else still holds: the program destroys what it is given."""
    held = zip(values, _references(values), strict=True)
    return [jnp.copy(v) if count > _UNSHARED else v for v, count in held]


def _references(values: list[Any]) -> list[int]:
    return [sys.getrefcount(v) for v in values]


# What `_references` says of a value that one variable and the list hold; Python versions differ.
_variable = [object()]
_UNSHARED = _references([*_variable])[0]


def _result_shapes(programs: list[Program], members: tuple[int, ...]) -> list[Any]:
    """For each result, None when all replicas agree on its shape, else the shape of each."""
    avals = [p.jaxpr.out_avals[: p.num_outputs] for p in programs]
    shapes = []
    for per_class in zip(*avals, strict=True):
        sizes = [tuple(a.shape) for a in per_class]
        if NO_ROWS in members:
            sizes.append((0, *sizes[0][1:]) if sizes[0] else ())
        each = [sizes[m] for m in members]
        shapes.append(None if len(set(each)) == 1 else each)
    return shapes


def _per_replica(stacked: Any, shapes: Any) -> PerReplica:
    whole = PerReplica.from_stacked(stacked)
    if shapes is None:
        return whole
    cut = [
        part[tuple(slice(0, n) for n in shape)]
        for part, shape in zip(whole.values, shapes, strict=True)
    ]
    return PerReplica(cut)


class Executor:
    """Compiles and runs the steps of one strategy.

    Args:
        strategy: owner.
        replica: makes the replica context in which `run` calls the user's function; None for
            functions in cross-replica context (`stratagem.function`).
        touches: variables that its functions are known to touch, which saves the trace that
            would discover them.
    """

    def __init__(self, strategy: Any, replica: Any, touches: Sequence[Any] = ()):
        self._strategy = strategy
        self.replica = replica
        self._cache: dict[Any, Compiled] = {}
        self._known = {id(v): v for v in touches}
        self._touched: dict[Any, dict[int, Any]] = {}  # variables that each step touches
        self._traces: dict[Any, int] = {}

    @property
    def touched(self) -> list[Any]:
        """The variables that the steps so far read or wrote, each once."""
        return list({i: v for found in self._touched.values() for i, v in found.items()}.values())

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `fn` as one compiled program; traces it at the first call with new shapes."""
        compiled, values = self.prepare(fn, args, kwargs)
        results, state = compiled.function(*compiled.state(), compiled.pack(values))
        compiled.check(results)
        compiled.store(state)
        return compiled.unpack(results)

    def prepare(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, fit: Fit | None = None
    ) -> tuple[Compiled, list[Any]]:
        """The compiled program for a call, and the call's dynamic arguments.

        Args:
            fn: the step.
            args: positional arguments.
            kwargs: keyword arguments.
            fit: how the step of a Keras model differs from one of `run`.
        """
        leaves, tree, keys = flatten((args, kwargs))
        key = (fn, tree, keys, fit, numerics.is_on())
        compiled = self._cache.get(key)
        if compiled is None:
            described = [describe(leaf) for leaf in leaves]
            if not context.is_default(self._strategy):
                self._check_counts(leaves)
            compiled = self._compile(fn, tree, described, fit)
            # Under the default strategy the trace may find the strategy that the values are of.
            self._check_counts(leaves)
            self._cache[key] = compiled
        return compiled, [leaves[i] for i in compiled.dynamic]

    def _check_counts(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if is_distributed(leaf):
                check_count(leaf, self._strategy)

    def lower(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, fit: Fit | None = None
    ) -> jax.stages.Lowered:
        """The program that a call would run, not run: to read or to count. As `prepare`."""
        compiled, values = self.prepare(fn, args, kwargs, fit)
        return compiled.function.lower(*compiled.state(), compiled.pack(values))

    def _compile(self, fn: Any, tree: Any, described: list[Any], fit: Fit | None) -> Compiled:
        self._count_trace(fn)
        strategy = self._strategy
        arguments = [d for d in described if isinstance(d, Argument)]
        rows = None if fit is None else fit.rows
        members, representatives = row_classes(arguments, strategy.num_replicas_in_sync, rows)
        classes = [
            (
                RowClass(i, members, None if rows is None else rows[r] / sum(rows)),
                [jax.ShapeDtypeStruct(a.shapes[r if a.split else 0], a.dtype) for a in arguments],
            )
            for i, r in enumerate(representatives)
        ]
        frame = context.Frame(strategy, replica=self.replica)
        split = [a.split for a in arguments]

        def call(*values: Any) -> Any:
            remaining = iter(values)
            leaves = [next(remaining) if isinstance(d, Argument) else d for d in described]
            leaves = [_as_local(v, d, self.replica) for v, d in zip(leaves, described, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fn(*args, **kwargs)

        def finish(program: Program, facts: Facts) -> Program:
            if facts.dirty:
                return program
            program = tape.resolve(program, facts)
            if fit is not None:
                _close(program, frame, split, fit)
            if numerics.is_on():
                numerics.instrument(program)
            return program

        facts = Facts(dict(self._touched.get(fn, self._known)))
        programs = trace(call, strategy, frame, classes, facts, finish)
        self._touched[fn] = facts.variables
        first = programs[0]
        variables.adopt_all(first.variables, strategy)
        inputs = invariance.input_state(first, split)
        mesh = strategy.mesh if strategy.num_replicas_in_sync > 1 else None
        if len(programs) == 1 and NO_ROWS not in members:
            if mesh is not None:
                first.jaxpr = invariance.simplify(first.jaxpr, inputs)
                invariance.check(first, inputs)
            run: Any = functools.partial(evaluate, first.jaxpr)
        else:
            run = uneven.merge(programs, members, inputs)
        function = boundary(first, run, mesh, split)
        return Compiled(strategy, first, function, described, programs, members)

    def _count_trace(self, fn: Any) -> None:
        code = getattr(fn, "__code__", fn)
        self._traces[code] = count = self._traces.get(code, 0) + 1
        if count == _MANY_TRACES:
            _log.warning(
                "%r has been traced %d times: each new function object, shape or Python argument "
                "makes a new program. Define the step once, outside the loop, and pass changing "
                "numbers as tensors.",
                getattr(fn, "__qualname__", fn),
                count,
            )


def _close(program: Program, frame: context.Frame, split: list[bool], fit: Fit) -> None:
    """Combines a fit step's metrics, and its results unless they are rows."""
    if frame.strategy.num_replicas_in_sync == 1:
        return
    outs = program.jaxpr.jaxpr.outvars
    accumulators = [
        (program.variables[i], out)
        for i, out in zip(program.written, outs[program.num_outputs :], strict=True)
        if variables.is_on_read(program.variables[i])
        and not variables.is_replicated_metric(program.variables[i])
    ]
    frame = dataclasses.replace(frame, trace=Trace(frame.strategy, Facts(), program.rows))
    program.jaxpr = effects.close(program.jaxpr, accumulators, frame)
    kind = "rows" if fit.rows_out and program.rows.even else "local" if fit.rows_out else "shared"
    program.out_leaves = [(kind if k == "local" else k, v) for k, v in program.out_leaves]
    if not fit.rows_out:
        vary = invariance.varying(program.jaxpr.jaxpr, invariance.input_state(program, split))
        program.jaxpr = effects.average_outputs(program.jaxpr, program.num_outputs, vary, frame)


def _as_local(value: Any, described: Any, replica: Any) -> Any:
    """In a cross-replica function a PerReplica argument stays one; a replica sees its part."""
    if isinstance(described, Argument) and described.split and replica is None:
        return LocalValue(value)
    return value
