"""What the worker puts in: elements of iterators, its index, and seeds of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import jaxprs_in_params

from stratagem.step import primitives
from stratagem.step.flatten import Equation
from stratagem.step.invariance import contains
from stratagem.step.parts import Given

CLOSURE = "closure"
_SPREAD = 0x9E3779B9  # odd: numbers of closures stay distinct (Knuth, TAOCP 3, section 6.4)


def given_of(eqns: Sequence[Equation], seeds: bool) -> list[tuple[Given, list[Any]]]:
    """The values that a worker puts in, each with the variables that name it.

    Args:
        eqns: of the worker's part.
        seeds: it reads seeds, which the number of the closure makes its own.
    """
    found: dict[Given, list[Any]] = {}
    for eqn in eqns:
        if eqn.primitive is primitives.given_p:
            p = eqn.params
            given = Given(p["kind"], p["key"], tuple(p["shape"]), str(p["dtype"]))
            found.setdefault(given, []).append(eqn.outvars[0])
    if seeds:
        found.setdefault(Given(CLOSURE, None, (), "uint32"), [])
    return list(found.items())


def refuse_inner_given(jaxpr: Any) -> None:
    """Refuses values of a worker in loops and branches of a flattened program.

    Raises:
        ValueError: there is one.
    """
    for eqn in jaxpr.eqns:
        if any(contains(body, (primitives.given_p,)) for body in jaxprs_in_params(eqn.params)):
            raise ValueError(
                "Expected next(iterator) and other values of a worker at the top level of a step. "
                f"Got one inside {eqn.primitive.name!r} (a loop, a branch or a function that JAX "
                "transforms). Take it before, and pass it in."
            )


def is_seed(variable: Any) -> bool:
    """True for the state of a Keras SeedGenerator: a seed and a counter, uint32."""
    name = variable.path.rpartition("/")[2]
    return name == "seed_generator_state" and tuple(variable.shape) == (2,)


def own_seed(state: Any, closure: Any) -> Any:
    """A seed that differs between closures that pulled the same one."""
    return state.at[0].add((closure * np.uint32(_SPREAD)).astype(state.dtype))
