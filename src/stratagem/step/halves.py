"""The compiled function of a step whose variables live apart from the replicas.

It takes and gives what `lower.boundary`'s function does, in two compiled programs: the replicas'
part over the mesh, for which the variables that it reads are copied to the replicas' devices and
let go afterwards; and the update, on the device that keeps the variables. See step/split.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.step import uneven
from stratagem.step.fuse import needed
from stratagem.step.lower import boundary, evaluate, weave
from stratagem.step.program import variables_of
from stratagem.step.split import Source, Split, carve, is_update, sources, split
from stratagem.step.trace import Program


class Halves:
    """A step in two compiled programs: `(donated, kept, arguments) -> (outputs, new state)`.

    Args:
        strategy: central.
        programs: one a row class.
        members: class of each replica.
        divided: for each argument, whether it is stacked `[replicas, ...]`.
        run: the row classes as one program, where they are several.
    """

    def __init__(
        self,
        strategy: Any,
        programs: Sequence[Program],
        members: Sequence[int],
        divided: Sequence[bool],
        run: Any,
    ):
        first = programs[0]
        merged = run if isinstance(run, uneven.Merged) else None
        count = len(first.variables)
        self._home = strategy.home
        self._there = NamedSharding(strategy.mesh, PartitionSpec())
        self._one = strategy.num_replicas_in_sync == 1
        self._count, self._outputs = count, first.num_outputs
        self._donated = [i in first.written for i in range(count)]
        inputs = [Source.STATE] * count
        inputs += [Source.DATA if d else Source.SHARED for d in divided]
        kinds = [kind for kind, _ in first.out_leaves if kind != "static"]
        stay = {i for i, kind in enumerate(kinds) if kind != "shared"}
        if merged is None:
            closed = first.jaxpr
        else:
            closed = merged.classes[0].closed
            each = zip(*(c.jaxpr.outvars for c in merged.classes), strict=True)
            stay |= {i for i, outs in enumerate(each) if not merged.agree(outs)}
        self.parts = split(closed, inputs, stay)
        self._back = [i for i in self.parts.own if kinds[i] == "shared"]  # to the variables' device
        self.reads = self.parts.reads
        jaxprs = [self.parts.replica]
        if merged is not None:
            self.reads, jaxprs = _of_classes(merged, self.parts, inputs)
        self._divided = [divided[i - count] for i in self.reads if i >= count]
        self._lone = [self._one or not d for d in self._divided]
        self._replicas = self._compile_replicas(strategy, programs, members, jaxprs, kinds)
        late = [i for i in range(len(closed.jaxpr.outvars)) if i not in self.parts.own]
        self._late = late
        self._update = self._compile_update(keep=bool(first.checks) or strategy.keeps_state)

    def _compile_replicas(
        self, strategy: Any, programs: Sequence[Program], members: Sequence[int],
        jaxprs: Sequence[ClosedJaxpr], kinds: Sequence[str],
    ) -> Any:  # fmt: skip
        results = [*(kinds[i] for i in self.parts.own), *("shared" for _ in self.parts.handed)]
        theirs = [
            dataclasses.replace(
                program,
                jaxpr=jaxpr,
                variables=[program.variables[i] for i in self.reads if i < self._count],
                written=[],
                out_leaves=[(kind, None) for kind in results],
            )
            for program, jaxpr in zip(programs, jaxprs, strict=True)
        ]
        self.reads_variables = theirs[0].variables
        if len(theirs) == 1 and uneven.NO_ROWS not in members:
            run: Any = functools.partial(evaluate, theirs[0].jaxpr)
        else:
            vary = [False] * len(self.reads_variables) + self._divided
            run = uneven.merge(theirs, members, vary)
        mesh = None if self._one else strategy.mesh
        return boundary(theirs[0], run, mesh, self._divided)

    def _compile_update(self, keep: bool) -> Any:
        keeps = self.parts.keeps
        given = [i < self._count and self._donated[i] for i in keeps]

        def update(handed: list[Any], written: list[Any], others: list[Any]) -> list[Any]:
            return evaluate(self.parts.update, [*handed, *weave(given, written, others)])

        self._written = [i for i, g in zip(keeps, given, strict=True) if g]
        self._others = [i for i, g in zip(keeps, given, strict=True) if not g]
        return jax.jit(update, out_shardings=self._home, donate_argnums=() if keep else 1)

    def __call__(self, given: list[Any], kept: list[Any], arguments: list[Any]) -> Any:
        """Runs both parts; the old values of the written variables are destroyed."""
        inputs = [*weave(self._donated, given, kept), *arguments]
        theirs, _ = self._replicas([], *self._sent(inputs))
        own, handed = theirs[: len(self.parts.own)], theirs[len(self.parts.own) :]
        outs = dict(zip(self.parts.own, own, strict=True))
        back = self._fetched([*handed, *(outs[i] for i in self._back)])
        outs.update(zip(self._back, back[len(handed) :], strict=True))
        if self._late:
            pick = ([inputs[i] for i in which] for which in (self._written, self._others))
            late = self._update(back[: len(handed)], *pick)
            outs.update(zip(self._late, late, strict=True))
        found = [outs[i] for i in range(len(outs))]
        return found[: self._outputs], found[self._outputs :]

    def _sent(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """What the replicas read, on their devices."""
        state = jax.device_put([inputs[i] for i in self.reads if i < self._count], self._there)
        arguments = [inputs[i] for i in self.reads if i >= self._count]
        lone = self._lone
        placed = jax.device_put([a for a, x in zip(arguments, lone, strict=True) if x], self._there)
        rest = [a for a, x in zip(arguments, lone, strict=True) if not x]
        return state, weave(lone, placed, rest)

    def _fetched(self, values: list[Any]) -> list[Any]:
        """Values that all replicas have alike, on the variables' device."""
        return jax.device_put([_near(v, self._home) for v in values], self._home)

    def lower(self, given: list[Any], kept: list[Any], arguments: list[Any]) -> jax.stages.Lowered:
        """The replicas' program, not run; inputs are described."""
        inputs = [*weave(self._donated, given, kept), *arguments]

        def there(i: int, divided: bool) -> Any:
            x = inputs[i]
            sharding = x.sharding if divided and not self._one else self._there
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = [there(i, False) for i in self.reads if i < self._count]
        read = [i for i in self.reads if i >= self._count]
        return self._replicas.lower(
            [], state, [there(i, d) for i, d in zip(read, self._divided, strict=True)]
        )


def _near(value: jax.Array, home: Any) -> jax.Array:
    """One device's copy of a value that many have; that of the variables' device where it can."""
    copies = value.addressable_shards
    return next((c.data for c in copies if c.device in home.device_set), copies[0].data)


def _of_classes(
    merged: uneven.Merged, parts: Split, inputs: Sequence[Source]
) -> tuple[list[int], list[ClosedJaxpr]]:
    """The replicas' part of each row class, and the inputs that any of them reads.

    The update is common to all classes: what it is handed has the same number in each.
    """
    first = merged.classes[0]
    found = []
    for cls in merged.classes:
        named: dict[int, Any] = {}
        for v, number in cls.number.items():
            named.setdefault(number, v)
        outs = [cls.jaxpr.outvars[i] for i in parts.own]
        outs += [named[first.number[v]] for v in parts.handed]
        source = sources(cls.closed, inputs)
        late = [e for e in cls.jaxpr.eqns if e.effects and is_update(e, source)]
        theirs = [e for e in cls.jaxpr.eqns if e not in late]
        found.append((cls, needed(theirs, outs), outs))
    used = [set(_atoms(eqns, outs)) for _, eqns, outs in found]
    reads = [
        i
        for i in range(len(inputs))
        if any(cls.jaxpr.invars[i] in u for (cls, *_), u in zip(found, used, strict=True))
    ]
    return reads, [
        carve(cls.closed, eqns, [cls.jaxpr.invars[i] for i in reads], outs)
        for cls, eqns, outs in found
    ]


def _atoms(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    return variables_of([*(v for eqn in eqns for v in eqn.invars), *outs])
