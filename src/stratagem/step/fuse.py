"""Stage 5, law 3: one collective for everything that can travel together.

Each value has a level: how many collectives it must wait for. All all-reduces whose operands are
of one level become a single fused one, so a training step whose gradients, metrics and statistics
come from one forward and backward pass needs one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from stratagem.step import primitives
from stratagem.step.program import variables_of

COLLECTIVES = (primitives.all_reduce_p, primitives.all_gather_p)


@dataclasses.dataclass(frozen=True)
class Level:
    """Equations that need no further collective, then the collectives that wait for them."""

    eqns: list[JaxprEqn]
    reduces: list[JaxprEqn]
    gathers: list[JaxprEqn]

    @property
    def operands(self) -> list[Any]:
        """What the replicas contribute to the fused all-reduce."""
        return [v for eqn in self.reduces for v in eqn.invars]

    @property
    def totals(self) -> list[Any]:
        """The results of the fused all-reduce, in the order of the operands."""
        return [v for eqn in self.reduces for v in eqn.outvars]

    @property
    def fused(self) -> dict[str, Any]:
        """The parameters of the one all-reduce that stands for all of them."""
        ops = tuple(op for eqn in self.reduces for op in eqn.params["ops"])
        return {**self.reduces[0].params, "ops": ops}


def schedule(jaxpr: Any) -> list[Level]:
    """The live equations of an (open) jaxpr by level; the last level has no collectives."""
    level_of: dict[Any, int] = {}
    levels: list[Level] = [Level([], [], [])]
    for eqn in live(jaxpr):
        level = max(
            (level_of.get(v, 0) for v in eqn.invars if not isinstance(v, Literal)), default=0
        )
        current = levels[level]
        if eqn.primitive in COLLECTIVES:
            reduce = eqn.primitive is primitives.all_reduce_p
            (current.reduces if reduce else current.gathers).append(eqn)
            level += 1
            if level == len(levels):
                levels.append(Level([], [], []))
        else:
            current.eqns.append(eqn)
        level_of.update(dict.fromkeys(eqn.outvars, level))
    return levels


def live(jaxpr: Any) -> list[JaxprEqn]:
    """The equations that an output or an effect needs, in order."""
    return needed(jaxpr.eqns, jaxpr.outvars)


def needed(eqns: Sequence[Any], atoms: Sequence[Any], effects: bool = True) -> list[Any]:
    """Those of some equations that some values need, and those with effects, in order.

    Args:
        eqns: in order.
        atoms: what is wanted of them.
        effects: whether effects are wanted too.
    """
    wanted = set(variables_of(atoms))
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(variables_of(eqn.invars))
    return kept[::-1]
