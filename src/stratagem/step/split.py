"""A program becomes two: what the replicas compute, and the update of the variables.

For strategies whose variables live on a device of their own. The replicas' part is whatever needs
their data, up to the values that meet in collectives and the gradients that an optimizer is given;
the update is what follows from those values, which are few, and from variables, which are many and
so stay where they are. What both parts need from variables alone, the replicas compute.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from stratagem.step import primitives
from stratagem.step.fuse import COLLECTIVES, live
from stratagem.step.invariance import contains
from stratagem.step.program import bind, read_all, variables_of, write_all


class Source(enum.IntEnum):
    """Where an input comes from, and what a value in the program was computed from."""

    STATE = 0  # variables alone
    SHARED = 1  # also arguments that are the same on all replicas
    DATA = 2  # also the replicas' own arguments
    MET = 3  # values that have met, and anything but data


@dataclasses.dataclass(frozen=True)
class Split:
    """A program in two parts, which together compute what it computes.

    Attributes:
        reads: positions of the inputs that the replicas' part takes, in order.
        own: positions of the outputs that it gives, in order.
        handed: variables of the original jaxpr that it gives after those, for the update.
        replica: `(*inputs[reads]) -> (*outputs[own], *handed)`.
        keeps: positions of the inputs that the update takes.
        update: `(*handed, *inputs[keeps]) -> the other outputs`, in order.
    """

    reads: list[int]
    own: list[int]
    handed: list[Any]
    replica: ClosedJaxpr
    keeps: list[int]
    update: ClosedJaxpr


def split(closed: ClosedJaxpr, inputs: Sequence[Source], own: Collection[int] = ()) -> Split:
    """Splits a program where its values meet.

    An equation belongs to the replicas when it depends on their data or on arguments (other than
    through a value that has met), and when the replicas need what it computes. The rest, which
    reads values that have met and variables, is the update. A value has met when a collective or
    an optimizer's `apply` has taken it: it is the same on all replicas.

    Args:
        closed: inputs as `inputs` says; its outputs are results and new values of variables.
        inputs: where each input comes from (not MET).
        own: positions of the outputs that differ between replicas, and so stay there.
    """
    jaxpr = closed.jaxpr
    own = sorted(own)
    rest = [i for i in range(len(jaxpr.outvars)) if i not in own]
    source = sources(closed, inputs)
    needed = set(_variables(jaxpr.outvars[i] for i in own))
    theirs: list[JaxprEqn] = []
    ours: list[JaxprEqn] = []
    for eqn in reversed(live(jaxpr)):
        if not is_update(eqn, source) or any(v in needed for v in eqn.outvars):
            theirs.append(eqn)
            needed.update(_variables(eqn.invars))
        else:
            ours.append(eqn)
    theirs, ours = theirs[::-1], ours[::-1]
    asked = [*(v for e in ours for v in e.invars), *(jaxpr.outvars[i] for i in rest)]
    wanted = dict.fromkeys(_variables(asked))
    made = {v for eqn in theirs for v in eqn.outvars}
    made |= {v for v, s in zip(jaxpr.invars, inputs, strict=True) if s is Source.DATA}
    handed = [v for v in wanted if v in made]
    gone = set(handed)
    reads = [i for i, v in enumerate(jaxpr.invars) if v in needed or v in gone]
    keeps = [i for i, v in enumerate(jaxpr.invars) if v in wanted and v not in made]
    outs = [*(jaxpr.outvars[i] for i in own), *handed]
    return Split(
        reads,
        own,
        handed,
        carve(closed, theirs, [jaxpr.invars[i] for i in reads], outs),
        keeps,
        carve(
            closed, ours, [*handed, *(jaxpr.invars[i] for i in keeps)],
            [jaxpr.outvars[i] for i in rest],
        ),
    )  # fmt: skip


def carve(
    closed: ClosedJaxpr, eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outputs: Sequence[Any]
) -> ClosedJaxpr:
    """A part of a program: these equations, from these of its variables to these."""

    def part(*args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        write_all(env, closed.jaxpr.constvars, closed.consts)
        write_all(env, inputs, args)
        for eqn in eqns:
            write_all(env, eqn.outvars, bind(eqn, read_all(env, eqn.invars)))
        return read_all(env, outputs)

    return jax.make_jaxpr(part)(*(v.aval for v in inputs))


def is_update(eqn: JaxprEqn, source: dict[Any, Source]) -> bool:
    """True for an equation that the replicas can leave to the update, unless they need it."""
    if meets(eqn) or _of_replicas(eqn):
        return False
    found = {source[v] for v in _variables(eqn.invars)}
    if Source.DATA in found or (eqn.effects and Source.MET not in found):
        return False
    return Source.MET in found or Source.SHARED not in found


def meets(eqn: JaxprEqn) -> bool:
    """True for an equation whose results are values that have met."""
    arrives = eqn.primitive is primitives.mark_p and eqn.params["kind"] == "arrived"
    return arrives or eqn.primitive in COLLECTIVES


def sources(closed: ClosedJaxpr, inputs: Sequence[Source]) -> dict[Any, Source]:
    """What each value of a program was computed from."""
    source = dict.fromkeys(closed.jaxpr.constvars, Source.STATE)
    source.update(zip(closed.jaxpr.invars, inputs, strict=True))
    for eqn in closed.jaxpr.eqns:
        found = {source[v] for v in _variables(eqn.invars)}
        if meets(eqn):
            of = Source.MET
        elif _of_replicas(eqn) or Source.DATA in found:
            of = Source.DATA
        else:
            of = max(found, default=Source.STATE)
        source.update(dict.fromkeys(eqn.outvars, of))
    return source


def _of_replicas(eqn: JaxprEqn) -> bool:
    """True for what only a replica can compute: it knows who it is, or waits for the others."""
    which = (primitives.replica_id_p, *COLLECTIVES)
    if eqn.primitive is primitives.replica_id_p or eqn.primitive.name == "io_callback":
        return True
    return any(contains(inner, which) for inner in jaxprs_in_params(eqn.params))


def _variables(atoms: Any) -> list[Any]:
    """Those of the atoms that are no literals, each once."""
    return list(dict.fromkeys(variables_of(atoms)))
