"""Calls of a traced step: find or make its compiled program, feed it, keep what it wrote."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from stratagem import context, variables
from stratagem.step import effects, invariance, numerics, tape, uneven
from stratagem.step.arguments import Argument, describe, flatten, row_classes
from stratagem.step.compiled import Compiled
from stratagem.step.halves import Halves
from stratagem.step.lower import boundary, evaluate
from stratagem.step.same import identity
from stratagem.step.together import in_step
from stratagem.step.trace import (
    NO_ROWS,
    Facts,
    LocalValue,
    Program,
    RowClass,
    Trace,
    trace,
)
from stratagem.values import check_count, is_distributed

_log = logging.getLogger("stratagem")
_MANY_TRACES = 16
_tracing = threading.RLock()  # what runs while a step is traced may be the user's, and one's state


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
        self._mesh = strategy.mesh
        self.replica = replica
        self._cache: dict[Any, Compiled] = {}
        self._same: dict[Any, Callable[..., Any]] = {}  # the first of functions that are the same
        self._known = {id(v): v for v in touches}
        self._touched: dict[Any, dict[int, Any]] = {}  # variables that each step touches
        self._traces: dict[Any, int] = {}

    @property
    def touched(self) -> list[Any]:
        """The variables that the steps so far read or wrote, each once."""
        return list({i: v for found in self._touched.values() for i, v in found.items()}.values())

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `fn` as one compiled program; traces it at the first call with new shapes."""
        if self._strategy.job is not None:
            return in_step(self, self._strategy, fn, args, kwargs)
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
        if self._mesh is not self._strategy.mesh:  # other processes than before
            self._mesh = self._strategy.mesh
            self._cache.clear()
        leaves, tree, keys = flatten((args, kwargs))
        how = (tree, keys, fit, numerics.is_on())
        compiled = self._cache.get((fn, *how))
        if compiled is None:
            fn = self._same.setdefault(identity(fn), fn)
            compiled = self._cache.get((fn, *how))
        if compiled is None:
            described = [describe(leaf) for leaf in leaves]
            if not context.is_default(self._strategy):
                self._check_counts(leaves)
            compiled = self._compile(fn, tree, described, fit)
            # Under the default strategy the trace may find the strategy that the values are of.
            self._check_counts(leaves)
            self._cache[fn, *how] = compiled
        return compiled, [leaves[i] for i in compiled.dynamic]

    def _check_counts(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if is_distributed(leaf):
                check_count(leaf, self._strategy)

    def lower(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, fit: Fit | None = None
    ) -> jax.stages.Lowered:
        """The program that a call would run, not run: to read or to count. As `prepare`."""
        if fit is None and self._strategy.spans:
            args, kwargs = self._strategy.join_arguments((args, kwargs), self.replica is None)
        compiled, _ = self.prepare(fn, args, kwargs, fit)
        return compiled.lower()

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
            if program.aggregated:
                _close(program, frame, split, fit)
            if numerics.is_on():
                numerics.instrument(program)
            return program

        facts = Facts(dict(self._touched.get(fn, self._known)))
        with _tracing:
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
        if strategy.central:
            function = Halves(strategy, programs, members, split, run)
        else:
            function = boundary(first, run, mesh, split, keep=strategy.keeps_state)
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


def _close(program: Program, frame: context.Frame, split: list[bool], fit: Fit | None) -> None:
    """Combines a step's metrics, and a fit step's results unless they are rows."""
    if frame.strategy.num_replicas_in_sync == 1:
        return
    outs = program.jaxpr.jaxpr.outvars
    accumulators = [
        (program.variables[i], out)
        for i, out in zip(program.written, outs[program.num_outputs :], strict=True)
        if invariance.differs(program.variables[i])
    ]
    frame = dataclasses.replace(frame, trace=Trace(frame.strategy, Facts(), program.rows))
    program.jaxpr = effects.close(program.jaxpr, accumulators, frame)
    if fit is None:
        return
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
