"""A function becomes a plan: traced once for each set of shapes, and cut into parts for workers."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from stratagem import context, variables
from stratagem.coordinator.arrays import check_numbers
from stratagem.coordinator.per_worker import PerWorkerIterator, Reading, read_by, variant_key
from stratagem.coordinator.per_worker_values import WorkerArrays
from stratagem.data.batch import Element
from stratagem.parameter_server.plan import Spec
from stratagem.step import apart, tape
from stratagem.step.arguments import Argument, describe, flatten
from stratagem.step.of_arguments import of_arguments
from stratagem.step.same import identity
from stratagem.step.trace import Facts, Program, RowClass, trace
from stratagem.strategies.parameter_server import ASYNCHRONOUS, HYBRID, SYNCHRONOUS
from stratagem.strategies.remote import is_remote
from stratagem.values import as_array

_log = logging.getLogger("stratagem")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A function for one set of shapes, as workers run it.

    Attributes:
        number: unique in the job.
        parts: what they do; `parts.unpack` makes the function's result.
        local: variables of the coordinator, to which each closure adds (metrics).
        elements: position and turn of each element that is taken, also of those that nothing is
            made of.
    """

    number: int
    parts: apart.Parts
    local: list[Any]
    elements: list[tuple[int, int]]

    def to_wire(
        self, specs: Mapping[int, Spec], staged: list[Any] | None
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """What a worker needs to have it.

        Args:
            specs: of the variables on the servers, by number.
            staged: the updates that wait for the commit of a round; None for all.
        """
        parts, blobs = self.parts.to_wire()
        used = {*self.parts.whole, *(t.vid for t in self.parts.tables)}
        used.update(vid for unit in self.parts.units for vid in unit.vids)
        fields = {
            "plan": self.number,
            "parts": parts,
            "specs": [specs[vid].wire() for vid in sorted(used)],
            "units": [[unit.uid, list(unit.vids)] for unit in self.parts.units],
            "local": [[list(v.shape), str(v.dtype)] for v in self.local],
            "staged": staged,
            "elements": [list(key) for key in self.elements],
        }
        return fields, [np.frombuffer(blob, np.uint8) for blob in blobs]


@dataclasses.dataclass(frozen=True)
class Family:
    """The plans of one function for one set of arguments, by the shapes of the elements it takes.

    Attributes:
        number: unique in the job.
        make: traces the function for elements of some shapes.
        plans: by `variant_key`; one with the key "" where it takes no elements.
        dynamic: which leaves of a call's arguments are arrays, and so go along.
        reads: which of a call's per-worker iterators it reads.
        where: the function, and where it is written.
    """

    number: int
    make: Callable[[dict[tuple[int, int], Any]], tuple[str, Plan]]
    plans: dict[str, Plan]
    dynamic: list[int]
    reads: tuple[int, ...]
    where: str = ""

    def plan(self, number: int) -> Plan:
        """The plan of a number."""
        return next(p for p in self.plans.values() if p.number == number)

    def variant(self, specs: dict[tuple[int, int], Any]) -> Plan:
        """The plan for elements of these shapes; made if there is none."""
        elements = {key: Element(*jax.tree.flatten(spec)) for key, spec in specs.items()}
        if (known := self.plans.get(variant_key(elements))) is not None:
            return known
        key, plan = self.make(specs)
        return self.plans.setdefault(key, plan)


class Call(NamedTuple):
    """A call of a function, as workers make it.

    Attributes:
        family: how they run it.
        arrays: what goes along: arrays, or one a worker.
        iterators: its per-worker iterators, by position.
    """

    family: Family
    arrays: list[Any]
    iterators: list[PerWorkerIterator]


class Plans:
    """The plans of one strategy. Any thread; one plan is made at a time.

    Args:
        strategy: served.
        replica: the replica context in which its functions run; None for scheduled ones.
        touches: variables that its functions are known to touch.
        fit: its functions are steps of a Keras model, whose losses are means over rows.
    """

    _numbers = itertools.count(1)
    _lock = threading.RLock()

    def __init__(
        self, strategy: Any, replica: Any = None, touches: Sequence[Any] = (), fit: bool = False
    ):
        self._strategy = strategy
        self._replica = replica
        self._rows = RowClass(0, (0,), 1.0 if fit else None)
        self._known = {id(v): v for v in touches}
        self._families: dict[Any, Family] = {}
        self._same: dict[Any, Callable[..., Any]] = {}
        self._touched: dict[Any, dict[int, Any]] = {}
        self._warned: set[str] = set()

    def find(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        """The plans for a call, made if it is new, and what goes along with it.

        Args:
            fn: ordinary Python over tensors and Keras variables; traced as `run` does.
            args: its positional arguments, with `WorkerArrays` for what each worker has its own
                of.
            kwargs: its keyword arguments.
        """
        leaves, tree, keys = flatten((args, kwargs))
        first, iterators = leaves, []
        if any(isinstance(leaf, (WorkerArrays, PerWorkerIterator)) for leaf in leaves):
            found = dict.fromkeys(x for x in leaves if isinstance(x, PerWorkerIterator))
            iterators = list(found)
            first = [_as_traced(leaf, iterators) for leaf in leaves]
            _, _, keys = flatten(first)
        family = self._families.get((fn, tree, keys))
        if family is None:
            with self._lock:
                fn = self._same.setdefault(identity(fn), fn)
                family = self._families.get((fn, tree, keys))
                if family is None:
                    family = self._new(fn, tree, first)
                self._families[fn, tree, keys] = family
        return Call(family, [_arrays(leaves[i]) for i in family.dynamic], iterators)

    def _new(self, fn: Callable[..., Any], tree: Any, leaves: list[Any]) -> Family:
        _check_numbers(jax.tree.unflatten(tree, leaves))
        described = [describe(leaf) for leaf in leaves]

        def make(specs: dict[tuple[int, int], Any]) -> tuple[str, Plan]:
            with self._lock:
                reading = Reading(specs)
                plan = self._make(fn, tree, described, reading)
                elements = {k: Element(*jax.tree.flatten(v)) for k, v in reading.seen.items()}
                return variant_key(elements), plan

        key, plan = make({})
        reads = tuple(sorted({position for position, _ in plan.elements}))
        dynamic = [i for i, d in enumerate(described) if isinstance(d, Argument)]
        return Family(next(self._numbers), make, {key: plan}, dynamic, reads, _where(fn))

    def beforehand(self, fn: Callable[..., Any], *args: Any) -> Callable[..., Any] | None:
        """What a function gives for such arguments, where that takes no variables.

        Returns:
            Computes its results' arrays from its arguments' in this process; None where it needs
            variables.
        """
        leaves, tree, _ = flatten((args, {}))
        with self._lock:
            program = self._trace(fn, tree, [describe(leaf) for leaf in leaves], Reading({}))
        found = of_arguments(program)
        return None if found is None else lambda *now: found(*flatten((now, {}))[0])

    def _make(
        self, fn: Callable[..., Any], tree: Any, described: list[Any], reading: Reading
    ) -> Plan:
        strategy = self._strategy
        program = self._trace(fn, tree, described, reading)
        variables.adopt_all(program.variables, strategy)
        local = [v for v in program.variables if not is_remote(v)]
        _check_local(program, local)
        in_rounds = strategy.consistency.mode == SYNCHRONOUS
        parts = apart.divide(program, strategy.home_of, local, in_rounds=in_rounds)
        self._warn_of_parts(parts)
        strategy.link.install(parts.units)
        return Plan(next(self._numbers), parts, local, sorted(reading.seen))

    def _trace(
        self, fn: Callable[..., Any], tree: Any, described: list[Any], reading: Reading
    ) -> Program:
        arguments = [d for d in described if isinstance(d, Argument)]
        specs = [jax.ShapeDtypeStruct(a.shapes[0], a.dtype) for a in arguments]
        frame = context.Frame(self._strategy, replica=self._replica)

        def call(*values: Any) -> Any:
            remaining = iter(values)
            leaves = [next(remaining) if isinstance(d, Argument) else d for d in described]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            with read_by(reading):
                return fn(*args, **kwargs)

        def finish(program: Program, facts: Facts) -> Program:
            return program if facts.dirty else tape.resolve(program, facts)

        facts = Facts(dict(self._touched.get(fn, self._known)))
        (program,) = trace(call, self._strategy, frame, [(self._rows, specs)], facts, finish)
        self._touched[fn] = facts.variables
        return program

    def _warn_of_parts(self, parts: apart.Parts) -> None:
        """Warns, once for a variable, of updates in rounds that are not those of one device."""
        mode = self._strategy.consistency.mode
        if mode == ASYNCHRONOUS or len(self._strategy.workers) == 1:
            return
        at_once = {p.uid for p in parts.pushes if p.table is not None and mode == HYBRID}
        new = {path: why for uid, path, why in parts.by_part if uid not in at_once | self._warned}
        self._warned.update(uid for uid, _, _ in parts.by_part)
        if new:
            path, why = next(iter(new.items()))
            more = f" and of {len(new) - 1} more" if len(new) > 1 else ""
            _log.warning(
                "The update of %r%s uses %r of gradients. Each worker computes that for its own "
                "part of the batch, before the mean of the round is taken, so it is not quite the "
                "update of one device. Use what works element by element (clipvalue instead of "
                "clipnorm and global_clipnorm; Adam instead of Adafactor and Muon), or, for norms, "
                "consistency='synchronous'.",
                path, more, why,
            )  # fmt: skip


def _where(fn: Any) -> str:
    """A function as errors name it, with where it is written."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    name = getattr(fn, "__qualname__", repr(fn))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _as_traced(leaf: Any, iterators: Sequence[PerWorkerIterator]) -> Any:
    """What a function is traced with in the place of a leaf."""
    if isinstance(leaf, PerWorkerIterator):
        return leaf.at(iterators.index(leaf))
    return leaf.values[0] if isinstance(leaf, WorkerArrays) else leaf


def _arrays(leaf: Any) -> Any:
    """What goes along for an argument: its array, or one a worker."""
    return leaf if isinstance(leaf, WorkerArrays) else as_array(leaf)


def _check_numbers(call: tuple[Any, Any]) -> None:
    """Refuses arguments that programs cannot take; names them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(call)[0]:
        which = "kwargs" if path[0] == jax.tree_util.SequenceKey(1) else "args"
        check_numbers(leaf, which + jax.tree_util.keystr(path[1:]))


def _check_local(program: Program, local: Sequence[Any]) -> None:
    """A closure adds to what it leaves on the coordinator, so that has to be a sum."""
    written = {id(program.variables[i]) for i in program.written}
    wrong = [v for v in local if id(v) in written and v.aggregation != "sum"]
    if wrong:
        raise ValueError(
            "Expected variables with synchronization 'on_read' to have aggregation 'sum' in a "
            "function for workers: each closure adds its part. Got "
            + ", ".join(variables.describe(v) for v in wrong)
            + ". Use aggregation='sum', or return the values and combine them on the coordinator."
        )
