"""How the stages read and re-emit the equations of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or a literal of a jaxpr."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def read_all(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """The values of several."""
    return [read(env, atom) for atom in atoms]


def write_all(env: dict[Any, Any], binders: Sequence[Any], values: Sequence[Any]) -> None:
    """Names the results of an equation."""
    for binder, value in zip(binders, values, strict=True):
        env[binder] = value


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Performs one equation on values, under whatever trace is current."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the bodies of nested `jax.jit` calls in place of the calls."""
    if not any(eqn.primitive.name in _CALLS for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: _inlined(closed, args))(*closed.in_avals)


_CALLS = ("jit", "pjit")


def _inlined(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = {}
    write_all(env, closed.jaxpr.constvars, closed.consts)
    write_all(env, closed.jaxpr.invars, args)
    for eqn in closed.jaxpr.eqns:
        values = read_all(env, eqn.invars)
        if eqn.primitive.name in _CALLS:
            write_all(env, eqn.outvars, _inlined(eqn.params["jaxpr"], values))
        else:
            write_all(env, eqn.outvars, bind(eqn, values))
    return read_all(env, closed.jaxpr.outvars)


def variables_of(atoms: Any) -> list[Any]:
    """Those of the atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, Literal)]
