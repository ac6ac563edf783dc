"""The debug stage: a program that also says which replica first holds NaN or infinity, and where.

It runs before the values of the replicas are combined, while it is still known whose they were.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from stratagem import context
from stratagem.errors import DivergedError
from stratagem.step import primitives
from stratagem.step.program import bind, read_all, write_all
from stratagem.step.trace import Check, Program

_on: contextvars.ContextVar[bool] = contextvars.ContextVar("stratagem_numerics", default=False)

# In the order of a step. What comes later may be spoiled by what came earlier.
_BEFORE, _GRADIENTS, _COMBINED, _RESULTS, _WRITES = range(5)
_STAGES = (
    "before the step",
    "before the gradients are combined",
    "before the values are combined",
    "in the step's results",
    "in what the step writes",
)


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Steps that start in the body of the `with` are checked."""
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_on() -> bool:
    """True inside `checking()`."""
    return _on.get()


def name_gradients(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Gradients that the checks will call by the paths of their variables."""
    trace = context.current().trace
    if not is_on() or trace is None or trace.synchronized or len(grads) != len(variables):
        return list(grads)
    return [
        None if g is None else primitives.mark_p.bind(jnp.asarray(g), kind="gradient", key=v.path)
        for g, v in zip(grads, variables, strict=True)
    ]


def instrument(program: Program) -> None:
    """Adds one more result to a program: for each of its checks, whether the value is spoiled."""
    closed = program.jaxpr
    found = [(c, v) for c, v in _values(program) if _is_float(v)]
    if not found:
        return
    count = program.num_outputs
    wanted = [v for _, v in found]

    def instrumented(*args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        write_all(env, closed.jaxpr.constvars, closed.consts)
        write_all(env, closed.jaxpr.invars, args)
        for eqn in closed.jaxpr.eqns:
            write_all(env, eqn.outvars, bind(eqn, read_all(env, eqn.invars)))
        outs = read_all(env, closed.jaxpr.outvars)
        spoiled = jnp.stack([~jnp.isfinite(v).all() for v in read_all(env, wanted)])
        return [*outs[:count], spoiled, *outs[count:]]

    program.jaxpr = jax.make_jaxpr(instrumented)(*closed.in_avals)
    program.checks = [check for check, _ in found]
    program.out_leaves = [*program.out_leaves, ("local", None)]


def _values(program: Program) -> Iterator[tuple[Check, Any]]:
    jaxpr = program.jaxpr.jaxpr
    names = [f"variable {v.path!r}" for v in program.variables]
    for i, atom in enumerate(jaxpr.invars):
        name = names[i] if i < len(names) else f"array argument {i - len(names)}"
        yield Check(_BEFORE, name), atom
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.mark_p and eqn.params["kind"] == "gradient":
            yield Check(_GRADIENTS, f"gradient of variable {eqn.params['key']!r}"), eqn.outvars[0]
        if eqn.primitive in (primitives.all_reduce_p, primitives.all_gather_p):
            for atom in eqn.invars:
                yield Check(_COMBINED, f"value of shape {atom.aval.shape}"), atom
    for i, atom in enumerate(jaxpr.outvars[: program.num_outputs]):
        yield Check(_RESULTS, f"array result {i}"), atom
    for i, atom in zip(program.written, jaxpr.outvars[program.num_outputs :], strict=True):
        yield Check(_WRITES, names[i]), atom


def _is_float(atom: Any) -> bool:
    return not isinstance(atom, Literal) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def judge(spoiled: Any, checks: Sequence[Sequence[Check]]) -> None:
    """Raises if a value was spoiled.

    Args:
        spoiled: `[replicas, checks]`, booleans.
        checks: for each replica, what the flags are of.

    Raises:
        DivergedError: names replicas and values of the earliest stage where one is spoiled.
    """
    bad = [
        (check.stage, replica, check.name)
        for replica, (flags, own) in enumerate(zip(spoiled, checks, strict=True))
        for flag, check in zip(flags, own, strict=False)  # classes of rows may have fewer checks
        if flag
    ]
    if not bad:
        return
    stage = min(bad)[0]
    lines = dict.fromkeys(f"  replica {r}: {name}" for s, r, name in bad if s == stage)
    listed = "\n".join(lines)
    raise DivergedError(
        f"Expected finite values on all replicas. Got NaN or infinity first {_STAGES[stage]}:\n"
        f"{listed}\nLook at what that replica computed from: its rows are "
        "strategy.experimental_local_results(batch)[replica]."
    )
