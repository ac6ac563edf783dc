"""Runs a script up to its first step, and counts that step: `stratagem plan` starts this process.

    python -m stratagem.cli.plan_trace WANTED SCRIPT [ARGUMENT ...]

`WANTED` is JSON, see `Wanted`. Whatever strategy the script makes, it gets one that has the planned
number of replicas and no devices; where it makes none, it runs in that one's scope.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stratagem import config, variables
from stratagem.keras_bridge.trainer import ModelStep
from stratagem.planning.program import Compiled, Program
from stratagem.step import counting, invariance
from stratagem.step.execute import Executor, Fit
from stratagem.step.lower import boundary, evaluate
from stratagem.strategies import DefaultStrategy, PlannedServers, PlannedStrategy, Strategy
from stratagem.strategies.described import describe_slice
from stratagem.values import PerReplica


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be traced.

    Args:
        out: file for the counts, as JSON; empty if the script ends without a step.
        replicas: how many.
        rows: of each replica; 0 for what the script gives.
        compiler: slice that libtpu compiles for, such as `"v5e:8x8"`; empty for none.
        module: the script is the name of a module.
    """

    out: str
    replicas: int
    rows: int = 0
    compiler: str = ""
    module: bool = False


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that the script gave to each replica, and those that are planned for each of them."""

    given: tuple[int, ...]
    planned: int


class Caught(BaseException):
    """Carries the first step out of the script, past all of its `except Exception`."""

    def __init__(self, what: str, compiled: Any, batch: Batch):
        super().__init__(what)
        self.what, self.compiled, self.batch = what, compiled, batch


def main(arguments: Sequence[str]) -> int:
    """Runs the script; returns the exit code."""
    wanted = Wanted(**json.loads(arguments[0]))
    planned = PlannedStrategy(wanted.replicas)
    asked: list[str] = []
    try:
        with replaced(planned, asked, wanted.rows), planned.scope():
            run_script(arguments[1:], wanted.module)
    except Caught as caught:
        program = count(caught, planned, asked, wanted)
        if wanted.compiler:  # What is known without it comes first: it may end this process.
            ended = dataclasses.replace(program, refused="nothing; it has ended its process")
            Path(wanted.out).write_text(ended.to_json())
            program = asked_compiler(program, caught, planned, wanted.compiler)
        Path(wanted.out).write_text(program.to_json())
        return 0
    Path(wanted.out).write_text("")
    return 0


def run_script(command: Sequence[str], module: bool) -> None:
    """Runs a script with its arguments as Python does; one that exits with 0 has ended."""
    script, sys.argv = command[0], list(command)
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


@contextlib.contextmanager
def replaced(planned: Strategy, asked: list[str], rows: int = 0) -> Iterator[None]:
    """In the body every strategy that is made is `planned`, and the first step raises `Caught`.

    Args:
        planned: the strategy.
        asked: gets the names of the classes that were to be made.
        rows: of each replica; 0 for what the script gives.
    """
    prepare, set_devices = Executor.prepare, config.set_virtual_devices

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs  # Which devices it was to have does not matter.
        asked.append(cls.__name__)
        return planned  # Of another class, so that Python does not initialise it.

    def catch(self: Executor, fn: Any, args: Any, kwargs: Any, fit: Fit | None = None) -> Any:
        batch = _batch((args, kwargs), fit, rows)
        args, kwargs = _even((args, kwargs), batch)
        if fit is not None:
            fit = dataclasses.replace(fit, rows=(batch.planned,) * len(fit.rows))
        compiled, _ = prepare(self, fn, args, kwargs, fit)
        raise Caught(_what(self, fn), compiled, batch)

    own_kinds = (DefaultStrategy, PlannedStrategy, PlannedServers)
    made = [c for c in _subclasses(Strategy) if c not in own_kinds]
    own = {c: c.__dict__["__new__"] for c in made if "__new__" in c.__dict__}
    try:
        for cls in made:
            cls.__new__ = new  # type: ignore[method-assign,assignment]
        Executor.prepare = catch  # type: ignore[method-assign]
        config.set_virtual_devices = lambda count: None  # The planned ones are enough for it.
        yield
    finally:
        config.set_virtual_devices = set_devices
        Executor.prepare = prepare  # type: ignore[method-assign]
        for cls in made:
            cls.__new__ = own.get(cls, _plain_new)  # type: ignore[method-assign]


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    # Once a class had a `__new__`, `object`'s refuses arguments, even when it is taken off again.
    del args, kwargs
    return object.__new__(cls)


def _subclasses(cls: type) -> list[type]:
    found: list[type] = cls.__subclasses__()
    return [c for direct in found for c in (direct, *_subclasses(direct))]


def _what(executor: Executor, fn: Any) -> str:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, ModelStep):
        return owner.doing
    name = getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
    return f"stratagem.function {name}" if executor.replica is None else f"strategy.run({name})"


def _batch(call: Any, fit: Fit | None, rows: int) -> Batch:
    """The rows of the call: those that `fit` says, else those of the first batched argument."""
    given: tuple[int, ...] = ()
    if fit is not None:
        given = fit.rows
    else:
        for leaf in jax.tree.leaves(call):
            if isinstance(leaf, PerReplica) and leaf.shapes[0]:
                given = tuple(shape[0] for shape in leaf.shapes)
                break
            if isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim:
                given = given or (leaf.shape[0],)
    return Batch(given, rows or max(given, default=0))


def _even(call: Any, batch: Batch) -> Any:
    """Every replica gets as many rows: the same ones, for only shapes matter from here on."""
    one = len(batch.given) == 1

    def change(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            if not leaf.shapes[0] or tuple(s[0] for s in leaf.shapes) != batch.given:
                return leaf
            part = _zeros(leaf.values[0], batch.planned)
            return PerReplica([part] * len(batch.given))
        if one and isinstance(leaf, (np.ndarray, jax.Array)) and leaf.shape[:1] == batch.given:
            return _zeros(leaf, batch.planned)
        return leaf

    return jax.tree.map(change, call)


def _zeros(part: Any, rows: int) -> Any:
    """As that part, with so many rows, in no memory."""
    dtype = jax.dtypes.canonicalize_dtype(part.dtype, allow_extended_dtype=True)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return part[:1].repeat(rows, 0)
    return np.broadcast_to(np.zeros((), np.dtype(str(dtype))), (rows, *part.shape[1:]))


def count(
    caught: Caught, planned: PlannedStrategy, asked: Sequence[str], wanted: Wanted
) -> Program:
    """What is known of the step from its program."""
    program, arguments = caught.compiled.program, caught.compiled.arguments
    split = [a.split for a in arguments]
    closed = program.jaxpr
    if wanted.replicas > 1:
        closed = invariance.simplify(closed, invariance.input_state(program, split))
    counted = counting.count(closed, wanted.replicas)
    written = {id(program.variables[i]) for i in program.written}
    trained = [v for v in program.variables if id(v) in written and v.trainable]
    planned_rows = caught.batch.planned * wanted.replicas
    return Program(
        caught=caught.what,
        strategy=tuple(asked) or ("none",),
        replicas=wanted.replicas,
        rows=planned_rows if wanted.rows else sum(caught.batch.given),
        rows_per_replica=caught.batch.planned,
        idle=0 if wanted.rows else sum(n == 0 for n in caught.batch.given),
        state=sum(counting.size_of(variables.local_spec(v)) for v in program.variables),
        trainable=sum(counting.size_of(variables.local_spec(v)) for v in trained),
        arguments=sum(
            counting.size_of(jax.ShapeDtypeStruct(a.shapes[0], a.dtype)) for a in arguments
        ),
        peak=counted.peak,
        operations=dict(counted.operations),
        bytes=counted.bytes,
        kernels=counted.kernels,
        reduces=tuple(counted.reduces),
        growing=tuple(counted.growing),
        gathers=tuple(counted.gathers),
        writes=bool(trained),
        unknown=counted.unknown,
    )


def asked_compiler(
    program: Program, caught: Caught, planned: PlannedStrategy, topology: str
) -> Program:
    """Adds what libtpu says of the step on a slice: figures, or why it does not compile it."""
    try:
        compiled = _compile(caught.compiled, planned, topology)
    except (ValueError, RuntimeError) as error:
        return dataclasses.replace(program, refused=str(error).splitlines()[0])
    return dataclasses.replace(program, compiled=compiled)


def _compile(compiled: Any, planned: PlannedStrategy, topology: str) -> Compiled:
    """Has libtpu compile the step for a slice, and asks it."""
    planned.describe(describe_slice(topology))
    program, split = compiled.program, [a.split for a in compiled.arguments]
    mesh = planned.mesh if planned.num_replicas_in_sync > 1 else None
    compiled.function = boundary(program, partial(evaluate, program.jaxpr), mesh, split)
    ready = compiled.lower().compile()
    memory, costs = ready.memory_analysis(), ready.cost_analysis()
    return Compiled(
        name=f"libtpu, {topology}",
        arguments=memory.argument_size_in_bytes,
        outputs=max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        temporary=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        operations=float(costs["flops"]),
        bytes=float(costs["bytes accessed"]),
        all_reduces=ready.as_text().count(" all-reduce("),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
