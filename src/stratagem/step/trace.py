"""Stage 1: a Python step becomes a program, with the variables it touches as inputs and outputs.

The function is traced with `jax.make_jaxpr` under a Keras `StatelessScope` that records which
variables are read and written. What a first attempt cannot know (which variables there are, how
many rows the other replicas contribute to a gather, which gradients are unconnected) it writes
down as facts, and the trace is taken again with them: usually twice for a new function, once for
a further shape of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import ClosedJaxpr

from stratagem import context, variables
from stratagem._jax import current_trace
from stratagem.errors import ReplicaBranchError
from stratagem.step import effects, primitives
from stratagem.values import DistributedValues, PerReplica, as_array

_ATTEMPTS = 8
NO_ROWS = -1  # class of a replica that has no rows and takes part in the collectives alone
_BRANCH_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)

# JAX keeps what it has traced of a function that `jax.jit` or `jax.checkpoint` wraps, with what
# variables were there. An attempt has its own: none may get, or leave behind, another's variables.
_attempts, _numbers = jax.make_user_context(0), itertools.count(1)


@dataclasses.dataclass
class Facts:
    """What the attempts at one trace have learned. Shared by the row classes of a step."""

    variables: dict[int, Any] = dataclasses.field(default_factory=dict)
    exchanges: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    # Row classes in which source i of gradient call c has no influence on the target.
    unconnected: dict[tuple[int, int], set[int]] = dataclasses.field(default_factory=dict)
    dirty: bool = False


@dataclasses.dataclass(frozen=True)
class RowClass:
    """Replicas that see the same shapes, and so run the same trace.

    Attributes:
        index: position among the classes of the step.
        members: class of each replica, `[replicas]`; NO_ROWS for one without rows in `fit`.
        weight: in `fit`, the share of the global batch's rows that one such replica holds; None
            in `run`, where gradients are summed and an empty replica runs the step like others.
    """

    index: int = 0
    members: tuple[int, ...] = (0,)
    weight: float | None = None

    @property
    def even(self) -> bool:
        """True when all replicas hold the same number of rows."""
        return len(set(self.members)) == 1


class Trace:
    """The state of one attempt at a trace; `context.Frame.trace` points to it."""

    def __init__(self, strategy: Any, facts: Facts, rows: RowClass):
        self.strategy = strategy
        self.facts = facts
        self.rows = rows
        self.synchronized = 0  # >0 while an optimizer applies gradients that are already reduced
        self.tapes = 0
        self.gradients = 0
        self._exchanges = 0
        self.scope: ProgramScope | None = None

    @property
    def aggregated(self) -> bool:
        """True where an on-read variable is one value between steps: see `Program.aggregated`."""
        return self.rows.weight is not None or self.strategy.central

    def is_unconnected(self, call: int, source: int) -> bool:
        """True for a source of a gradient that has no influence on its target on any replica."""
        classes = self.facts.unconnected.get((call, source), set())
        return classes >= set(self.rows.members) - {NO_ROWS}

    def exchange(self, number: int) -> tuple[int, ...]:
        """Tells every replica's `number` to all of them, while tracing. `[replicas]`.

        Replicas of one row class hold the same number; those of others are known from their own
        traces, in the attempt after the one that met this exchange first.
        """
        members = self.rows.members
        if self.rows.even:
            return (number,) * len(members)
        known = self.facts.exchanges.setdefault(self._exchanges, {})
        self._exchanges += 1
        if known.get(self.rows.index) != number:
            known[self.rows.index] = number
            self.facts.dirty = True
        if len(known) < len(set(members) - {NO_ROWS}):
            self.facts.dirty = True
        return tuple(0 if c == NO_ROWS else known.get(c, number) for c in members)


class ProgramScope(keras.StatelessScope):
    """Serves variable reads from the program's inputs, and keeps writes as its outputs."""

    def __init__(self, trace: Trace):
        super().__init__(initialize_variables=False)
        self.trace = trace
        trace.scope = self
        self.written: dict[int, Any] = {}
        self.reads: list[Any] = []  # variables, each time that one is read
        self._level = current_trace()

    def add_update(self, update: Any) -> None:
        variable, value = update
        if current_trace() is not self._level:
            raise RuntimeError(
                "Expected writes to variables at the top level of a step. Got a write to "
                f"{variables.describe(variable)} at {variables.user_line()}, inside a loop, a "
                "branch or a function that JAX transforms (jit, grad, vmap, scan, cond), which "
                "values leave only by being returned. Return the value and assign it afterwards; "
                "differentiate layers that have state with stratagem.GradientTape."
            )
        self.local_value(variable)  # a written variable is an input too: it is donated
        self.state_mapping[id(variable)] = value
        self.written[id(variable)] = variable

    def get_current_value(self, variable: Any) -> Any:
        self.reads.append(variable)
        value = self.local_value(variable)
        if context.current().replica is None and variables.is_on_read(variable):
            return effects.aggregate_read(variable, value, context.current())
        return value

    def local_value(self, variable: Any) -> Any:
        """This replica's value of the variable, which becomes an input if it was not yet."""
        if id(variable) not in self.state_mapping:
            facts = self.trace.facts
            facts.variables[id(variable)] = variable
            facts.dirty = True
            self.state_mapping[id(variable)] = variables.stand_in(variable)
        return self.state_mapping[id(variable)]


@dataclasses.dataclass(frozen=True)
class Check:
    """A value that the debug stage looks at: the part of the step it is of, and its name."""

    stage: int
    name: str


@dataclasses.dataclass
class Program:
    """A step as data.

    `jaxpr` takes the variables' local values, then the arguments' local values, and gives the
    dynamic outputs, then the new values of the written variables.

    Attributes:
        variables: inputs, in order.
        written: positions in `variables` of the outputs, in order.
        out_tree: structure of the function's result.
        out_leaves: for each leaf, ("static", object), ("local", None) or ("shared", None).
        rows: the row class that it was traced for.
        aggregated: on-read variables enter and leave as their aggregate (in `fit`, and of central
            variables), not as components.
        checks: what the flags are of that step/numerics.py added as the last result, if it did.
    """

    jaxpr: ClosedJaxpr
    variables: list[Any]
    written: list[int]
    out_tree: Any
    out_leaves: list[tuple[str, Any]]
    rows: RowClass
    aggregated: bool = False
    checks: list[Check] = dataclasses.field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.jaxpr.jaxpr.outvars) - len(self.written)

    def write_all_of(self, written: list[int]) -> None:
        """Makes the program write these variables, some perhaps with the value they had."""
        if written == self.written:
            return
        closed, old, count = self.jaxpr, self.written, self.num_outputs

        def program(*args: Any) -> list[Any]:
            values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
            state = dict(zip(old, values[count:], strict=True))
            return [*values[:count], *(state.get(i, args[i]) for i in written)]

        self.jaxpr = jax.make_jaxpr(program)(*closed.in_avals)
        self.written = written


def trace(
    fn: Callable[..., Any],
    strategy: Any,
    frame: context.Frame,
    classes: Sequence[tuple[RowClass, Sequence[Any]]],
    facts: Facts,
    finish: Callable[[Program, Facts], Program],
) -> list[Program]:
    """Traces `fn` once for each row class.

    Args:
        fn: takes the dynamic arguments' local values; returns any structure.
        strategy: whose program it is.
        frame: the context in which fn runs; its `trace` is filled in.
        classes: row classes with the local shapes of their arguments.
        facts: what earlier traces of fn learned; extended here.
        finish: later stage that may itself learn facts (step/tape.py).

    Raises:
        ReplicaBranchError: fn made a Python value of a traced one.
    """
    for attempt in range(_ATTEMPTS):
        facts.dirty = False
        try:
            programs = [
                finish(_attempt(fn, strategy, frame, rows, specs, facts), facts)
                for rows, specs in classes
            ]
        except _BRANCH_ERRORS as error:
            if facts.dirty:
                continue
            raise _branch_error(error) from error
        except Exception:
            # An attempt that still lacked facts may fail for that alone.
            if not facts.dirty or attempt == _ATTEMPTS - 1:
                raise
            continue
        if not facts.dirty:
            return programs
    raise RuntimeError(
        "Expected a step function that touches the same variables each time it is called. Got "
        f"new ones in each of {_ATTEMPTS} traces. Create variables outside the function, or once "
        "(`if self.v is None: self.v = keras.Variable(...)`)."
    )


def _attempt(
    fn: Callable[..., Any],
    strategy: Any,
    frame: context.Frame,
    rows: RowClass,
    specs: Sequence[Any],
    facts: Facts,
) -> Program:
    state = list(facts.variables.values())
    current = Trace(strategy, facts, rows)
    found: dict[str, Any] = {}

    def program(state_values: list[Any], arguments: list[Any]) -> Any:
        scope = ProgramScope(current)
        for variable, value in zip(state, state_values, strict=True):
            if current.aggregated and variables.is_on_read(variable):
                value = effects.local_start(variable, value, strategy)
            scope.state_mapping[id(variable)] = value
        with context.entered(dataclasses.replace(frame, trace=current)), scope:
            outputs = fn(*arguments)
        leaves, found["tree"] = jax.tree.flatten(
            outputs, is_leaf=lambda x: isinstance(x, (DistributedValues, keras.Variable))
        )
        found["leaves"], dynamic = _classify(leaves, frame)
        found["written"] = [i for i, v in enumerate(state) if id(v) in scope.written]
        return dynamic, [scope.state_mapping[id(state[i])] for i in found["written"]]

    state_specs = [variables.local_spec(v) for v in state]
    with _attempts(next(_numbers)):
        jaxpr = jax.make_jaxpr(program)(state_specs, list(specs))
    jaxpr = ClosedJaxpr(jaxpr.jaxpr, [_off_mesh(const) for const in jaxpr.consts])
    return Program(
        jaxpr, state, found["written"], found["tree"], found["leaves"], rows, current.aggregated
    )


def _off_mesh(const: Any) -> Any:
    """A captured array without its layout over devices: inside a program it is a constant.

    Layers keep such arrays, made from the values of mirrored variables (Normalization does).
    """
    if not isinstance(const, jax.Array) or len(const.devices()) == 1:
        return const
    if const.is_fully_replicated:
        return const.addressable_data(0)
    return jax.device_put(const, min(const.devices(), key=lambda device: device.id))


def _classify(leaves: list[Any], frame: context.Frame) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Splits a result into what the program computes and what Python already knows."""
    described: list[tuple[str, Any]] = []
    dynamic = []
    for leaf in leaves:
        if isinstance(leaf, LocalValue):
            described.append(("local", None))
            dynamic.append(leaf.local)
        elif isinstance(leaf, jax.Array) or hasattr(leaf, "__array_interface__"):
            described.append(("shared" if frame.replica is None else "local", None))
            dynamic.append(leaf if isinstance(leaf, jax.Array) else jnp.asarray(as_array(leaf)))
        else:
            described.append(("static", leaf))
    return described, dynamic


class LocalValue(PerReplica):
    """A PerReplica value inside a trace: only this replica's part has a name there."""

    __slots__ = ("local",)

    def __init__(self, local: Any):
        super().__init__((local,))
        self.local = local

    @property
    def values(self) -> tuple[Any, ...]:
        """Not available: one program serves all replicas."""
        raise ValueError(
            "Expected strategy.reduce, strategy.gather or strategy.run on a PerReplica value "
            "inside a traced function. Got a request for its parts. The parts exist only after "
            "the compiled call returned; return the value and look at it there."
        )

    def __repr__(self) -> str:
        return f"PerReplica(traced {self.local!r})"


def _branch_error(error: Exception) -> ReplicaBranchError:
    """Turns JAX's concretisation errors into advice for a replica function."""
    where = ""
    traceback = error.__traceback__
    while traceback is not None:
        if variables.is_user_frame(traceback.tb_frame):
            code = traceback.tb_frame.f_code
            where = f" at {code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return ReplicaBranchError(
        "Expected a step function that Python can run once for all replicas. Got Python code that "
        f"needs the value of a tensor{where} (an `if`, `while`, int(), float() or .numpy() on "
        "a replica id, a variable or a batch). Choose between values with "
        "`jnp.where(replica_id == 0, a, b)`, between computations with "
        "`jax.lax.cond(replica_id == 0, f, g)`; print with `jax.debug.print`."
    )


def replica_id(frame: context.Frame) -> Any:
    """The id of the replica that runs the traced code, int32 scalar."""
    if frame.trace is None or frame.strategy.num_replicas_in_sync == 1:
        return jnp.zeros((), jnp.int32)
    return primitives.replica_id_p.bind()


@contextlib.contextmanager
def synchronized(frame: context.Frame) -> Iterator[None]:
    """In the body, all replicas compute the same from values that they share, as one device."""
    frame.trace.synchronized += 1
    try:
        yield
    finally:
        frame.trace.synchronized -= 1
