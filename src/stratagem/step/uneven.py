"""Uneven batches: replicas with different row counts run one program, each on exactly its rows.

The step is traced once for each distinct shape (a row class). The traces are merged: between two
collectives each replica enters the branch of its class (`jax.lax.switch`), the collectives
themselves are shared. Values that every class computes alike from replicated inputs are found by
value numbering (Alpern, Wegman and Zadeck, POPL 1988) and are computed once, outside the
branches, so that mirrored variables stay bit-identical.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from stratagem import variables
from stratagem.errors import ReplicaDependentWriteError, UnevenShapesError
from stratagem.step import primitives
from stratagem.step.fuse import Level, schedule
from stratagem.step.invariance import varying, write_error
from stratagem.step.lower import perform
from stratagem.step.program import inline, read, read_all, write_all
from stratagem.step.trace import Program


class _Class:
    """One trace with the numbers of its values."""

    def __init__(self, program: Program, inputs_vary: Sequence[bool]):
        self.closed = inline(program.jaxpr)
        self.jaxpr = self.closed.jaxpr
        self.levels = schedule(self.jaxpr)
        # An equation runs in one place, with all that it gives.
        self.vary = varying(self.jaxpr, inputs_vary, whole=True)
        self.number: dict[Any, Any] = {}
        for i, v in enumerate(self.jaxpr.invars):
            self.number[v] = ("input", i)
        for v, const in zip(self.jaxpr.constvars, self.closed.consts, strict=True):
            self.number[v] = ("const", _const_number(const))
        for depth, level in enumerate(self.levels):
            for eqn in level.eqns:
                self._refuse_collectives_inside(eqn)
                key = (eqn.primitive.name, _param_number(eqn.params), *map(self.of, eqn.invars))
                for i, v in enumerate(eqn.outvars):
                    self.number[v] = hash((key, i, str(v.aval)))
            outs = [v for eqn in (*level.reduces, *level.gathers) for v in eqn.outvars]
            for i, v in enumerate(outs):
                self.number[v] = ("collective", depth, i)

    def of(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return ("literal", str(atom.aval), str(atom.val))
        return self.number[atom]

    def invariant_numbers(self) -> set[Any]:
        return {n for v, n in self.number.items() if not self.vary[v]}

    def _refuse_collectives_inside(self, eqn: JaxprEqn) -> None:
        for inner in jaxprs_in_params(eqn.params):
            text = str(inner)
            if " all_reduce[" in text or " all_gather[" in text:
                raise UnevenShapesError(
                    f"Expected all_reduce and all_gather at the top level of a step when replicas "
                    f"hold different numbers of rows. Got one inside {eqn.primitive.name!r} (a "
                    "loop, a branch or jax.jit). Move it out, or give every replica the same "
                    "number of rows (drop_remainder=True)."
                )


@dataclasses.dataclass(frozen=True)
class Merged:
    """Row classes ready to run as one program. `members[r]` is replica r's class, -1 if empty."""

    classes: list[_Class]
    members: tuple[int, ...]
    common: frozenset[Any]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return _run(self, inputs)


def merge(
    programs: Sequence[Program], members: Sequence[int], inputs_vary: Sequence[bool]
) -> Merged:
    """Joins the traces of the row classes and proves law 2 for the whole.

    Args:
        programs: one a class.
        members: class of each replica; -1 for a replica without rows that takes no part but in
            the collectives, where it adds zero.
        inputs_vary: which inputs differ between replicas.

    Raises:
        UnevenShapesError: the classes meet different collectives.
        ReplicaDependentWriteError: a mirrored variable would not stay equal.
    """
    classes = [_Class(p, inputs_vary) for p in programs]
    _check_collectives(classes)
    common = frozenset.intersection(*(frozenset(c.invariant_numbers()) for c in classes))
    merged = Merged(classes, tuple(members), common)
    first = programs[0]
    outs = [c.jaxpr.outvars[first.num_outputs :] for c in classes]
    offenders = [
        first.variables[index]
        for k, index in enumerate(first.written)
        if _mirrored(first, index)
        and not all(_is_common(c, out[k], common) for c, out in zip(classes, outs, strict=True))
    ]
    if offenders:
        raise ReplicaDependentWriteError(write_error(offenders))
    return merged


def _mirrored(program: Program, index: int) -> bool:
    variable = program.variables[index]
    kept_equal = not variables.is_on_read(variable) or variables.is_replicated_metric(variable)
    return program.aggregated or kept_equal


def _is_common(cls: _Class, atom: Any, common: frozenset[Any]) -> bool:
    return isinstance(atom, Literal) or cls.number[atom] in common


def _check_collectives(classes: Sequence[_Class]) -> None:
    def path(cls: _Class) -> list[Any]:
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


def _run(merged: Merged, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates the merged program on one replica, inside `shard_map`.

    `inputs` are in the shape of the largest class; each branch cuts out its class's rows.
    """
    classes, common = merged.classes, merged.common
    first = classes[0]
    env: dict[Any, Any] = {}  # number -> value, the same on all replicas
    for cls in classes:
        for v, const in zip(cls.jaxpr.constvars, cls.closed.consts, strict=True):
            env[cls.number[v]] = const
        for v, value in zip(cls.jaxpr.invars, inputs, strict=True):
            env[cls.number[v]] = value
    table = jnp.asarray([m if m >= 0 else len(classes) for m in merged.members], jnp.int32)
    which = table[jax.lax.axis_index(primitives.AXIS)]
    carried: list[dict[Any, Any]] = [{} for _ in classes]  # each class's own live values
    for depth, level in enumerate(first.levels):
        for eqn in level.eqns:
            if all(first.number[v] in common for v in eqn.outvars):
                values = [_lookup(first, env, v) for v in eqn.invars]
                for v, out in zip(eqn.outvars, perform(eqn, values), strict=True):
                    env[first.number[v]] = out
        last = depth == len(first.levels) - 1
        wanted = [_wanted(cls, depth, last) for cls in classes]
        keep = [[] if last else _live_after(cls, depth, common) for cls in classes]
        results, carried = _branch(merged, depth, env, which, carried, wanted, keep)
        if last:
            return [
                _lookup(first, env, out) if _is_common(first, out, common) else result
                for out, result in zip(first.jaxpr.outvars, results, strict=True)
            ]
        _share(level, depth, results, env)
    return []


def _lookup(cls: _Class, env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[cls.number[atom]]


def _wanted(cls: _Class, depth: int, last: bool) -> list[Any]:
    """What a branch must hand out at the end of a level: operands of collectives, or results."""
    if last:
        return list(cls.jaxpr.outvars)
    level = cls.levels[depth]
    return [v for eqn in (*level.reduces, *level.gathers) for v in eqn.invars]


def _live_after(cls: _Class, depth: int, common: frozenset[Any]) -> list[Any]:
    """A class's own values, made up to this level, that a later level reads."""
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
    env: dict[Any, Any],
    which: Any,
    carried: list[dict[Any, Any]],
    wanted: list[list[Any]],
    keep: list[list[Any]],
) -> tuple[list[Any], list[dict[Any, Any]]]:
    """Runs a level's own equations of each class in a branch; returns padded results."""
    classes, common = merged.classes, merged.common
    shapes = [
        tuple(max(sizes) for sizes in zip(*(c_shape for c_shape in per_class), strict=True))
        for per_class in zip(*([v.aval.shape for v in w] for w in wanted), strict=True)
    ]
    dtypes = [v.aval.dtype for v in wanted[0]]

    def blank(avals: Sequence[Any]) -> list[Any]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in avals]

    def body(k: int) -> Any:
        cls = classes[k]

        def run() -> Any:
            local = dict(carried[k])
            for v in (*cls.jaxpr.constvars, *cls.jaxpr.invars):
                local[v] = _cut(env[cls.number[v]], v.aval.shape)
            for v, number in cls.number.items():
                if number in common and number in env:
                    local[v] = env[number]
            for eqn in cls.levels[depth].eqns:
                if not all(v in local for v in eqn.outvars):
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
        zeros = [jnp.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        return zeros, [blank(k) for k in keep]

    outs, own = jax.lax.switch(which, [*(body(k) for k in range(len(classes))), empty])
    return outs, [dict(zip(k, values, strict=True)) for k, values in zip(keep, own, strict=True)]


def _share(level: Level, depth: int, operands: list[Any], env: dict[Any, Any]) -> None:
    """The collectives of a level, on what the branches handed out."""
    count = sum(len(eqn.invars) for eqn in level.reduces)
    totals: list[Any] = []
    if count:
        params = level.reduces[0].params
        totals = primitives.run_all_reduce(
            *operands[:count],
            ops=tuple(op for eqn in level.reduces for op in eqn.params["ops"]),
            via=params["via"],
            replicas=params["replicas"],
        )
    for eqn, value in zip(level.gathers, operands[count:], strict=True):
        totals.append(primitives.run_all_gather(value, **eqn.params))
    for i, total in enumerate(totals):
        env[("collective", depth, i)] = total


def _cut(value: Any, shape: tuple[int, ...]) -> Any:
    return value if value.shape == shape else value[tuple(slice(0, n) for n in shape)]


def _pad(value: Any, shape: tuple[int, ...]) -> Any:
    if value.shape == shape:
        return value
    return jnp.pad(value, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])


def _const_number(const: Any) -> Any:
    array = np.asarray(const)
    if array.nbytes > 4096:
        return (array.shape, str(array.dtype), hash(array.tobytes()))
    return (array.shape, str(array.dtype), array.tobytes())


def _param_number(params: Any) -> Any:
    """A stable identity of an equation's parameters: programs by text, functions by name."""
    if isinstance(params, dict):
        return tuple((k, _param_number(v)) for k, v in sorted(params.items()))
    if isinstance(params, (tuple, list)):
        return tuple(_param_number(v) for v in params)
    if isinstance(params, (ClosedJaxpr, Jaxpr)):
        return str(params)
    if callable(params):
        return getattr(params, "__qualname__", type(params).__qualname__)
    return repr(params)
