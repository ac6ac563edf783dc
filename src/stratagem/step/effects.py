"""Stage 2: what a write to a variable means when every replica makes it.

`write` and `add` are called (by the Keras bridge) for each `assign` of a traced step and decide
what is recorded; `close` combines the metrics of a `fit` step, so that reads after the last
update see the aggregate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from stratagem import context, variables
from stratagem.step import primitives
from stratagem.step.program import bind, read_all, write_all


def write(variable: Any, value: Any) -> Any:
    """The value that `variable.assign(value)` stores, in the current frame of a trace.

    Mirrored variables: SUM, MEAN and ONLY_FIRST_REPLICA combine the replicas' values; a layer's
    statistic is averaged, weighted by rows; NONE is stored as it is, and step/invariance.py then
    proves that it is the same on all replicas. On-read variables keep their component.
    """
    frame = context.current()
    if frame.strategy.num_replicas_in_sync == 1:
        return value
    # `update` may change a central variable that synchronises on read.
    shared = frame.strategy.central and frame.replica is None and variables.is_on_read(variable)
    if frame.trace.synchronized and not shared:
        return value
    if variables.is_on_read(variable):
        if frame.replica is None:
            return _spread_local(variable, value, frame)
        return primitives.mark_p.bind(value, kind="component", key=id(variable))
    if frame.replica is None:
        return value
    if variable.aggregation == "none":
        return _average_rows(value, frame) if variables.is_statistic(variable) else value
    return _combine(variable, value, frame)


def add(variable: Any, delta: Any) -> Any | None:
    """The combined `delta` of an assign_add in the current frame; None if it is not combined.

    In cross-replica context each component of an on-read variable takes the same delta.
    """
    frame = context.current()
    if frame.strategy.num_replicas_in_sync == 1 or frame.trace.synchronized:
        return None
    if variables.is_on_read(variable):
        if frame.replica is not None or frame.strategy.central:
            return None
        if variables.read_aggregation(variable) == "sum":
            raise ValueError(variables.no_cross_replica_add(variable))
        return delta
    if frame.replica is None or variable.aggregation == "none":
        return None
    return _combine(variable, delta, frame)


def _combine(variable: Any, value: Any, frame: context.Frame) -> Any:
    return _reduce(value, _op(variable), frame)


def _reduce(value: Any, op: str, frame: context.Frame) -> Any:
    # A flag of the first replica travels as a number; the sum of flags stays an error.
    sent = value.astype(jnp.int32) if op == "first" and value.dtype == jnp.bool_ else value
    (combined,) = primitives.all_reduce([sent], [op], frame)
    return combined.astype(value.dtype)


def aggregate_read(variable: Any, component: Any, frame: context.Frame) -> Any:
    """What a cross-replica read of an on-read variable gives, inside a trace."""
    if frame.strategy.num_replicas_in_sync == 1:
        return component
    if variable.aggregation == "none":
        raise ValueError(variables.no_read_aggregation(variable))
    if frame.trace.aggregated:  # `close` knows whether the component has been combined by then
        return primitives.mark_p.bind(component, kind="aggregate", key=_op(variable))
    return _combine(variable, component, frame)


def _op(variable: Any) -> str:
    how = variables.read_aggregation(variable)
    return {"sum": "sum", "mean": "mean", "only_first_replica": "first"}[how]


def _average_rows(value: Any, frame: context.Frame) -> Any:
    (mean,) = average_rows([value], frame)
    return mean


def average_rows(values: list[Any], frame: context.Frame) -> list[Any]:
    """The replicas' values averaged, each weighted by the rows that its replica holds."""
    rows = frame.trace.rows
    if rows.weight is None or rows.even:
        return primitives.all_reduce(values, ["mean"] * len(values), frame)
    scaled = [v * jnp.asarray(rows.weight, v.dtype) for v in values]
    return primitives.all_reduce(scaled, ["sum"] * len(values), frame)


def _spread_local(variable: Any, value: Any, frame: context.Frame) -> Any:
    """This replica's component after a cross-replica assign of an aggregate."""
    if variables.read_aggregation(variable) != "sum":
        return value
    replicas = frame.strategy.num_replicas_in_sync
    if jnp.issubdtype(value.dtype, jnp.integer):
        first = primitives.replica_id_p.bind() == 0
        share = value // replicas
        return jnp.where(first, value - share * (replicas - 1), share)
    return value / jnp.asarray(replicas, value.dtype)


def local_start(variable: Any, aggregate: Any, strategy: Any) -> Any:
    """This replica's component at the start of a step, from the aggregate that is kept between.

    A sum starts from the whole aggregate on replica 0 and from zero elsewhere, so that adding up
    the components at the end of the step rounds as one device would.
    """
    if strategy.num_replicas_in_sync == 1 or variables.read_aggregation(variable) != "sum":
        return aggregate
    first = primitives.replica_id_p.bind() == 0
    return jnp.where(first, aggregate, jnp.zeros_like(aggregate))


def close(
    closed: ClosedJaxpr, accumulators: Sequence[tuple[Any, Any]], frame: context.Frame
) -> Any:
    """Combines the on-read variables that a step writes where each takes its last value.

    What reads a metric after its last update (the logs) then sees the value of all replicas, and
    the combination travels in the same fused all-reduce as the gradients.

    Args:
        closed: the program.
        accumulators: pairs of an on-read variable and the output that is its new component.
        frame: gives the strategy.
    """
    how = {out: variable for variable, out in accumulators if not isinstance(out, Literal)}
    jaxpr = closed.jaxpr

    def settle(env: dict[Any, Any], binders: Sequence[Any]) -> None:
        for binder in binders:
            if binder in how:
                env[binder] = _combine(how[binder], env[binder], frame)

    def program(*args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        write_all(env, jaxpr.constvars, closed.consts)
        write_all(env, jaxpr.invars, args)
        for eqn in jaxpr.eqns:
            values = read_all(env, eqn.invars)
            if _is_aggregate(eqn) and (
                isinstance(eqn.invars[0], Literal) or eqn.invars[0] not in how
            ):
                values = [_reduce(values[0], eqn.params["key"], frame)]
            write_all(env, eqn.outvars, bind(eqn, values))
            settle(env, eqn.outvars)
        return read_all(env, jaxpr.outvars)

    return jax.make_jaxpr(program)(*closed.in_avals)


def _is_aggregate(eqn: JaxprEqn) -> bool:
    return eqn.primitive is primitives.mark_p and eqn.params["kind"] == "aggregate"


def average_outputs(
    closed: ClosedJaxpr, outputs: int, vary: dict[Any, bool], frame: context.Frame
) -> ClosedJaxpr:
    """Averages by rows each of the first `outputs` results that differs between replicas."""
    outs = closed.jaxpr.outvars
    which = [i for i, v in enumerate(outs[:outputs]) if not isinstance(v, Literal) and vary[v]]
    if not which:
        return closed

    def program(*args: Any) -> list[Any]:
        values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
        floats = [values[i].astype(jnp.result_type(values[i], jnp.float32)) for i in which]
        for i, mean in zip(which, average_rows(floats, frame), strict=True):
            values[i] = mean
        return values

    return jax.make_jaxpr(program)(*closed.in_avals)
