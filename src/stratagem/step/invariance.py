"""Stage 4, law 2: a data-flow proof that mirrored variables stay equal on all replicas.

Every value of a program is either invariant (the same on all replicas) or varying. Replicated
inputs are invariant, the replica's own data and its id vary, an all-reduce makes invariant again,
and anything computed from a varying value varies. Loops are walked to a fixed point, branches are
joined. (Data-flow analysis on a two-point lattice: Kildall, POPL 1973.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxprs_in_params

from stratagem import variables
from stratagem._jax import scan_split
from stratagem.errors import ReplicaBranchError, ReplicaDependentWriteError
from stratagem.step import primitives
from stratagem.step.fuse import COLLECTIVES
from stratagem.step.program import bind, read_all, write_all
from stratagem.step.trace import Program


def varying(jaxpr: Any, inputs: Sequence[bool], whole: bool = False) -> dict[Any, bool]:
    """For each variable of an (open) jaxpr, whether it varies, given the inputs' state.

    With `whole`, an equation that gives one varying result gives no invariant one.
    """
    state: dict[Any, bool] = dict.fromkeys(jaxpr.constvars, False)
    state.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        read = [not isinstance(v, Literal) and state[v] for v in eqn.invars]
        outs = _outputs(eqn, read)
        if whole and any(outs):
            outs = [True] * len(outs)
        state.update(zip(eqn.outvars, outs, strict=True))
    return state


def _through(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    state = varying(inner, inputs)
    return [not isinstance(v, Literal) and state[v] for v in inner.outvars]


def _outputs(eqn: JaxprEqn, read: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if eqn.primitive in COLLECTIVES:
        return [False] * len(eqn.outvars)
    if eqn.primitive is primitives.replica_id_p or name == "io_callback":  # the host may say more
        return [True] * len(eqn.outvars)
    if name == "scan":
        return _scan(eqn, read)
    if name == "while":
        return _while(eqn, read)
    if name == "cond":
        _refuse_waiting(eqn, read[0])
        branches = [_through(b, read[1:]) for b in eqn.params["branches"]]
        return [read[0] or any(outs) for outs in zip(*branches, strict=True)]
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if body is not None and len(getattr(body, "jaxpr", body).invars) == len(read):
        outs = _through(body, read)
        if len(outs) == len(eqn.outvars):
            return outs
    knows_id = any(
        contains(inner, (primitives.replica_id_p,)) for inner in jaxprs_in_params(eqn.params)
    )
    return [knows_id or any(read)] * len(eqn.outvars)


def contains(jaxpr: Any, which: Sequence[Any]) -> bool:
    """True when an (open) jaxpr, or one inside it, has an equation of one of these primitives."""
    return any(
        eqn.primitive in which
        or any(contains(inner, which) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def _refuse_waiting(eqn: JaxprEqn, condition_varies: bool) -> None:
    """A collective that some replicas reach and others do not never returns."""
    bodies = jaxprs_in_params(eqn.params)
    if condition_varies and any(contains(body, COLLECTIVES) for body in bodies):
        raise ReplicaBranchError(
            "Expected all replicas to take part in each all_reduce and all_gather. Got one inside "
            f"a {eqn.primitive.name!r} whose condition differs between replicas: those that do "
            "not reach it would keep the others waiting for ever. Move it out, and choose "
            "between values with jnp.where."
        )


def _scan(eqn: JaxprEqn, read: list[bool]) -> list[bool]:
    consts, carry = scan_split(eqn.params)
    head, state, tail = read[:consts], read[consts : consts + carry], read[consts + carry :]
    while True:
        outs = _through(eqn.params["jaxpr"], [*head, *state, *tail])
        merged = [a or b for a, b in zip(state, outs[:carry], strict=True)]
        if merged == state:
            return [*state, *outs[carry:]]
        state = merged


def _while(eqn: JaxprEqn, read: list[bool]) -> list[bool]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    conds = read[:cond_consts]
    bodies = read[cond_consts : cond_consts + body_consts]
    state = read[cond_consts + body_consts :]
    while True:
        (stop,) = _through(eqn.params["cond_jaxpr"], [*conds, *state])
        _refuse_waiting(eqn, stop)
        outs = _through(eqn.params["body_jaxpr"], [*bodies, *state])
        # Replicas that leave the loop at different times end with different values.
        merged = [stop or a or b for a, b in zip(state, outs, strict=True)]
        if merged == state:
            return state
        state = merged


def input_state(program: Program, argument_varies: Sequence[bool]) -> list[bool]:
    """Which inputs of a program vary: on-read components and the replicas' own data."""
    components = [not program.aggregated and differs(v) for v in program.variables]
    return [*components, *argument_varies]


def differs(variable: Any) -> bool:
    """Whether replicas keep components of a variable that need not be equal."""
    return variables.is_on_read(variable) and not variables.is_replicated_metric(variable)


def must_agree(program: Program, index: int) -> bool:
    """Whether what a program writes to a variable must be the same on all replicas."""
    return program.aggregated or not differs(program.variables[index])


def simplify(closed: ClosedJaxpr, inputs: Sequence[bool]) -> ClosedJaxpr:
    """Takes out all-reduces of values that are the same everywhere: they need no traffic."""
    state = varying(closed.jaxpr, inputs)
    reduces = [e for e in closed.jaxpr.eqns if e.primitive is primitives.all_reduce_p]
    if not any(isinstance(v, Literal) or not state[v] for e in reduces for v in e.invars):
        return closed

    def program(*args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        write_all(env, closed.jaxpr.constvars, closed.consts)
        write_all(env, closed.jaxpr.invars, args)
        for eqn in closed.jaxpr.eqns:
            values = read_all(env, eqn.invars)
            if eqn.primitive is not primitives.all_reduce_p:
                write_all(env, eqn.outvars, bind(eqn, values))
                continue
            vary = [not isinstance(v, Literal) and state[v] for v in eqn.invars]
            for out, value, op, moves in zip(
                eqn.outvars, values, eqn.params["ops"], vary, strict=True
            ):
                if moves:
                    (env[out],) = primitives.all_reduce_p.bind(
                        value, **{**eqn.params, "ops": (op,)}
                    )
                else:
                    env[out] = _same_everywhere(value, op, eqn.params["replicas"])
        return read_all(env, closed.jaxpr.outvars)

    return jax.make_jaxpr(program)(*closed.in_avals)


def _same_everywhere(value: Any, op: str, replicas: int) -> Any:
    if op == "sum":
        return value * jnp.asarray(replicas, jnp.asarray(value).dtype)
    value = jnp.asarray(value)
    return primitives.divide(value, 1) if op == "mean" else value


def check(program: Program, inputs: Sequence[bool]) -> None:
    """Proves law 2 for every mirrored variable that a program writes.

    Raises:
        ReplicaDependentWriteError: names each variable with a write that varies.
    """
    jaxpr = program.jaxpr.jaxpr
    state = varying(jaxpr, inputs)
    outs = jaxpr.outvars[program.num_outputs :]
    offenders = [
        program.variables[i]
        for i, out in zip(program.written, outs, strict=True)
        if not isinstance(out, Literal) and state[out] and must_agree(program, i)
    ]
    if offenders:
        raise ReplicaDependentWriteError(write_error(offenders))


def write_error(offenders: Sequence[Any]) -> str:
    """The text of the error for writes that differ between replicas."""
    listed = "\n".join(f"  {variables.describe(v)}" for v in offenders)
    return (
        "Expected every value written to a mirrored variable to be the same on all replicas. Got "
        f"replica-dependent values for {len(offenders)} variable(s):\n{listed}\n"
        "Say how the replicas' values combine when you create the variable: aggregation='sum', "
        "'mean' or 'only_first_replica', or synchronization='on_read' to keep one component a "
        "replica; or combine them yourself with "
        "get_replica_context().all_reduce('SUM', value)."
    )
