"""What a program computes of its arguments alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from stratagem.step.fuse import needed
from stratagem.step.program import inline, variables_of
from stratagem.step.split import carve
from stratagem.step.trace import Program


def of_arguments(program: Program) -> Callable[..., Any] | None:
    """The results of a program, compiled on their own.

    Args:
        program: its effects, and what it writes, are left out.

    Returns:
        Computes them from the program's arguments; None where they depend on variables.
    """
    closed = inline(program.jaxpr)
    state = set(closed.jaxpr.invars[: len(program.variables)])
    inputs = closed.jaxpr.invars[len(program.variables) :]
    outputs = closed.jaxpr.outvars[: program.num_outputs]
    eqns = needed(closed.jaxpr.eqns, outputs, effects=False)
    asked = [*outputs, *(v for eqn in eqns for v in eqn.invars)]
    if not state.isdisjoint(variables_of(asked)):
        return None
    return jax.jit(jaxpr_as_fun(carve(closed, eqns, inputs, outputs)))
