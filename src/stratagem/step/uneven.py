"""Uneven batches: replicas with different row counts run one program, each on exactly its rows.

The step is traced once for each distinct shape (a row class). The traces are merged: between two
collectives each replica enters the branch of its class (`jax.lax.switch`), the collectives
themselves are shared. Values that every class computes alike from replicated inputs are found by
value numbering (step/numbering.py) and are computed once, outside the branches, so that mirrored
variables stay bit-identical.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxprs_in_params

from stratagem.errors import ReplicaDependentWriteError, UnevenShapesError
from stratagem.step import primitives
from stratagem.step.fuse import COLLECTIVES, Level
from stratagem.step.invariance import contains, must_agree, write_error
from stratagem.step.lower import perform, run_all_gather, run_all_reduce
from stratagem.step.numbering import Numbered, Table
from stratagem.step.program import read, read_all, write_all
from stratagem.step.trace import NO_ROWS, Program
from stratagem.values import PerReplica, cut


@dataclasses.dataclass(frozen=True)
class Merged:
    """Row classes ready to run as one program.

    Attributes:
        classes: the trace of each.
        members: class of each replica, NO_ROWS for one that only adds zero to the collectives.
        common: numbers of the values that all classes compute alike, the same on all replicas.
    """

    classes: list[Numbered]
    members: tuple[int, ...]
    common: frozenset[int]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Evaluates the merged program on one replica, inside `shard_map`.

        `inputs` are in the shape of the largest class; each branch cuts out its class's rows.
        """
        first = self.classes[0]
        env: dict[int, Any] = {}  # number -> value, the same on all replicas
        for cls in self.classes:
            for v, const in zip(cls.jaxpr.constvars, cls.closed.consts, strict=True):
                env[cls.number[v]] = const
            for v, value in zip(cls.jaxpr.invars, inputs, strict=True):
                env[cls.number[v]] = value
        table = [m if m != NO_ROWS else len(self.classes) for m in self.members]
        which = jnp.asarray(table, jnp.int32)[jax.lax.axis_index(primitives.AXIS)]
        carried: list[dict[Any, Any]] = [{} for _ in self.classes]  # each class's own live values
        for depth, level in enumerate(first.levels[:-1]):
            self._run_common(level, env)
            wanted = [_contributions(cls.levels[depth]) for cls in self.classes]
            values, carried = _branch(self, depth, env, which, carried, wanted)
            count = len(level.operands)
            if count:
                totals = run_all_reduce(*values[:count], **level.fused)
                env.update(zip(map(first.of, level.totals), totals, strict=True))
            for eqn, value in zip(level.gathers, values[count:], strict=True):
                env[first.number[eqn.outvars[0]]] = run_all_gather(value, **eqn.params)
        self._run_common(first.levels[-1], env)
        results = list(zip(*(cls.jaxpr.outvars for cls in self.classes), strict=True))
        differ = [outs for outs in results if not self.agree(outs)]
        wanted = [[outs[k] for outs in differ] for k in range(len(self.classes))]
        values, _ = _branch(self, len(first.levels) - 1, env, which, carried, wanted)
        own = iter(values)
        return [_lookup(first, env, outs[0]) if self.agree(outs) else next(own) for outs in results]

    def agree(self, atoms: Sequence[Any]) -> bool:
        """True when these values, one of each class, are one value, the same on all replicas."""
        numbers = {cls.of(atom) for cls, atom in zip(self.classes, atoms, strict=True)}
        return len(numbers) == 1 and (isinstance(atoms[0], Literal) or numbers <= self.common)

    def is_common(self, cls: Numbered, eqn: JaxprEqn) -> bool:
        """True for an equation that runs once, outside the branches."""
        return bool(eqn.outvars) and all(cls.number[v] in self.common for v in eqn.outvars)

    def _run_common(self, level: Level, env: dict[int, Any]) -> None:
        first = self.classes[0]
        for eqn in level.eqns:
            if self.is_common(first, eqn):
                results = perform(eqn, [_lookup(first, env, v) for v in eqn.invars])
                env.update(zip(map(first.of, eqn.outvars), results, strict=True))


def merge(
    programs: Sequence[Program], members: Sequence[int], inputs_vary: Sequence[bool]
) -> Merged:
    """Joins the traces of the row classes and proves law 2 for the whole.

    Args:
        programs: one a class. They are made to write the same variables, and `programs[0]` to
            describe the results of all.
        members: class of each replica; NO_ROWS for a replica without rows that takes no part but
            in the collectives, where it adds zero.
        inputs_vary: which inputs differ between replicas.

    Raises:
        UnevenShapesError: the classes meet different collectives or return different structures.
        ReplicaDependentWriteError: a mirrored variable would not stay equal.
    """
    _align(programs, members)
    table: Table = {}
    classes = [Numbered(p, inputs_vary, table) for p in programs]
    _check_collectives(classes)
    common = frozenset.intersection(*(frozenset(c.invariant) for c in classes))
    merged = Merged(classes, tuple(members), common)
    first = programs[0]
    writes = zip(*(c.jaxpr.outvars[first.num_outputs :] for c in classes), strict=True)
    offenders = [
        first.variables[index]
        for index, outs in zip(first.written, writes, strict=True)
        if must_agree(first, index) and not merged.agree(outs)
    ]
    if offenders:
        raise ReplicaDependentWriteError(write_error(offenders))
    return merged


def _align(programs: Sequence[Program], members: Sequence[int]) -> None:
    """Makes the classes write the same variables and `programs[0]` describe all their results."""
    described = [_describe_results(p) for p in programs]
    if any(d != described[0] for d in described):
        raise UnevenShapesError(
            "Expected a step that returns the same structure, ranks and dtypes for any number of "
            "rows. Got different ones on replicas with different numbers of rows: "
            + "; ".join(f"class {i}: {d}" for i, d in enumerate(described))
            + ". Return tensors, such as jnp.zeros(()) instead of 0.0, in every case."
        )
    first = programs[0]
    for i, leaves in enumerate(zip(*(p.out_leaves for p in programs), strict=True)):
        statics = [value for _, value in leaves]
        if leaves[0][0] == "static" and any(s != statics[0] for s in statics[1:]):
            # A number that Python took from the shapes: each replica's own.
            first.out_leaves[i] = ("static", PerReplica([statics[max(m, 0)] for m in members]))
    written = sorted({i for p in programs for i in p.written})
    for program in programs:
        program.write_all_of(written)


def _describe_results(program: Program) -> Any:
    avals = iter(program.jaxpr.out_avals)

    def describe(kind: str) -> str:
        if kind == "static":
            return "a Python object"
        aval = next(avals)
        return f"{aval.dtype} of rank {aval.ndim}"

    return str(program.out_tree), [describe(kind) for kind, _ in program.out_leaves]


def _check_collectives(classes: Sequence[Numbered]) -> None:
    inside = [
        eqn.primitive.name
        for cls in classes
        for level in cls.levels
        for eqn in level.eqns
        if any(contains(inner, COLLECTIVES) for inner in jaxprs_in_params(eqn.params))
    ]
    if inside:
        raise UnevenShapesError(
            "Expected all_reduce and all_gather at the top level of a step when replicas hold "
            f"different numbers of rows. Got one inside {sorted(set(inside))} (a loop or a "
            "branch). Move it out, or give every replica the same number of rows "
            "(drop_remainder=True)."
        )

    def path(cls: Numbered) -> list[Any]:
        reduces = [
            [(eqn.params["ops"], [v.aval.str_short() for v in eqn.invars]) for eqn in level.reduces]
            for level in cls.levels
        ]
        return [(r, len(level.gathers)) for r, level in zip(reduces, cls.levels, strict=True)]

    paths = [path(c) for c in classes]
    if any(p != paths[0] for p in paths):
        raise UnevenShapesError(
            "Expected all replicas to reduce the same shapes in the same order. Got different "
            "ones on replicas with different numbers of rows: "
            + "; ".join(f"class {i}: {p}" for i, p in enumerate(paths))
            + ". Reduce values whose shape does not depend on the batch (sum over its rows first)."
        )


def _lookup(cls: Numbered, env: dict[int, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[cls.number[atom]]


def _contributions(level: Level) -> list[Any]:
    """What each replica hands to the collectives of a level."""
    return [*level.operands, *(v for eqn in level.gathers for v in eqn.invars)]


def _live_after(cls: Numbered, depth: int, common: frozenset[Any]) -> list[Any]:
    """A class's own values, made up to this level, that a later level reads."""
    if depth == len(cls.levels) - 1:
        return []
    made = {v for level in cls.levels[: depth + 1] for eqn in level.eqns for v in eqn.outvars}
    later = [v for level in cls.levels[depth + 1 :] for v in _reads(level)]
    later += cls.jaxpr.outvars
    found = (v for v in later if not isinstance(v, Literal))
    return list(dict.fromkeys(v for v in found if v in made and cls.number[v] not in common))


def _reads(level: Level) -> list[Any]:
    return [v for eqn in (*level.eqns, *level.reduces, *level.gathers) for v in eqn.invars]


def _branch(
    merged: Merged,
    depth: int,
    env: dict[int, Any],
    which: Any,
    carried: list[dict[Any, Any]],
    wanted: list[list[Any]],
) -> tuple[list[Any], list[dict[Any, Any]]]:
    """Runs a level's own equations of each class in a branch; returns padded results."""
    classes, common = merged.classes, merged.common
    keep = [_live_after(cls, depth, common) for cls in classes]
    shapes = [
        tuple(max(sizes) for sizes in zip(*(c_shape for c_shape in per_class), strict=True))
        for per_class in zip(*([v.aval.shape for v in w] for w in wanted), strict=True)
    ]
    dtypes = [v.aval.dtype for v in wanted[0]]

    def blank(avals: Sequence[Any]) -> list[Any]:
        return [jax.lax.full(v.aval.shape, 0, v.aval.dtype) for v in avals]

    def body(k: int) -> Any:
        cls = classes[k]

        def run() -> Any:
            local = dict(carried[k])
            for v in (*cls.jaxpr.constvars, *cls.jaxpr.invars):
                local[v] = cut(env[cls.number[v]], v.aval.shape)
            for v, number in cls.number.items():
                if number in common and number in env:
                    local[v] = env[number]
            for eqn in cls.levels[depth].eqns:
                if not merged.is_common(cls, eqn):
                    write_all(local, eqn.outvars, perform(eqn, read_all(local, eqn.invars)))
            outs = [
                _pad(jnp.asarray(read(local, v), dtype), shape)
                for v, shape, dtype in zip(wanted[k], shapes, dtypes, strict=True)
            ]
            own = [[local[v] for v in keep[j]] if j == k else blank(keep[j])
                   for j in range(len(classes))]  # fmt: skip
            return outs, own

        return run

    def empty() -> Any:
        zeros = [jax.lax.full(s, 0, d) for s, d in zip(shapes, dtypes, strict=True)]
        return zeros, [blank(k) for k in keep]

    outs, own = jax.lax.switch(which, [*(body(k) for k in range(len(classes))), empty])
    return outs, [dict(zip(k, values, strict=True)) for k, values in zip(keep, own, strict=True)]


def _pad(value: Any, shape: tuple[int, ...]) -> Any:
    if value.shape == shape:
        return value
    return jnp.pad(value, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])
