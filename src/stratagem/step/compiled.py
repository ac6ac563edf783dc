"""One compiled program of a step: what it is fed, and what becomes of its results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import context, variables
from stratagem.step import numerics
from stratagem.step.arguments import Argument
from stratagem.step.lower import describe_inputs
from stratagem.step.trace import NO_ROWS, Program
from stratagem.values import IndexedSlices, PerReplica, as_array, cut, is_whole, padded


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
        self._spans = strategy.spans
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
        if self._spans:
            self._move_in()
        given = [v.components if c else v._value for v, c in self._given_slots]
        kept = [v.components if c else v._value for v, c in self._kept_slots]
        return given if self._strategy.keeps_state else _own(given), kept

    def _move_in(self) -> None:
        """Variables of other processes than now, or of this one alone, come to the replicas."""
        for variable, component in (*self._given_slots, *self._kept_slots):
            if not component:
                variable._value = self._strategy.place(variable._value)

    @property
    def given(self) -> list[tuple[Any, bool]]:
        """The variables that it writes, each with whether it does so by component."""
        return self._given_slots

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
        results, state = self._strategy.execute(self.function, given, kept, self.pack(values))
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
            return self._strategy.place(value.values[0])
        if (whole := value.stacked) is not None:
            return whole
        if jnp.issubdtype(argument.dtype, jax.dtypes.prng_key):
            keys = np.stack([np.asarray(jax.random.key_data(key)) for key in value.values])
            impl = jax.random.key_impl(value.values[0])
            return jax.random.wrap_key_data(self._strategy.place_local(keys), impl=impl)
        parts = [as_array(part) for part in value.values]
        return self._strategy.place_local(padded(parts, argument.padded, argument.dtype))

    def lower(self) -> jax.stages.Lowered:
        """The program, not run. Its inputs are only described, so its devices need not be here."""
        slots = self._given_slots, self._kept_slots
        return self.function.lower(*describe_inputs(self._strategy, *slots, self.arguments))

    def check(self, results: Sequence[Any]) -> None:
        """Looks at the flags of a program that has some, before anything is stored."""
        if self.program.checks:
            flags = np.asarray(self._strategy.whole(results[-1]))
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
                value = self._per_replica(value, self._result_shapes[position])
            elif self._spans and kind == "rows":
                value = self._strategy.whole(value)
            elif self._spans:
                value = self._strategy.local_view(value)
            leaves.append(value)
            position += 1
        result = jax.tree.unflatten(tree, leaves)
        if self._sparse and not self._one:
            return jax.tree.map(_whole, result, is_leaf=is_whole)
        return result

    def _per_replica(self, stacked: Any, shapes: Any) -> PerReplica:
        whole = PerReplica.from_stacked(stacked)
        if shapes is None:
            return whole
        own = [shapes[i] for i in self._strategy.local_replicas]
        parts = [cut(part, shape) for part, shape in zip(whole.values, own, strict=True)]
        return PerReplica(parts, shapes)


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
