"""The few operations that a traced step knows beyond JAX's own, and how they differentiate.

They are bound while a step is traced, outside any mesh. `step/lower.py` gives them their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

AXIS = "replica"  # the one mesh axis of a synchronous program

# Identity that gives a value a name in the program: a watched variable, a metric's new value.
mark_p = Primitive("mark")
# This replica's id, int32 scalar.
replica_id_p = Primitive("replica_id")
# Combines each operand over the replicas; ops[i] is "sum", "mean" or "first" (replica 0's value).
all_reduce_p = Primitive("all_reduce")
all_reduce_p.multiple_results = True
# Concatenates the replicas' operands along axis 0; sizes[r] is what replica r contributes.
all_gather_p = Primitive("all_gather")
# Where a tape began, and where its gradient was asked for; step/tape.py takes both out.
tape_start_p = Primitive("tape_start")
gradient_p = Primitive("gradient")
gradient_p.multiple_results = True
# A value that only the worker can give: see `given`.
given_p = Primitive("given")


def given(kind: str, key: Any, shape: Sequence[int], dtype: Any) -> Any:
    """A value that the worker puts in where it runs a closure; at the top level of a step.

    Args:
        kind: what it is, as the worker knows it: "element" of an iterator, "worker" index,
            "closure" number.
        key: which one of the kind; plain data (numbers, strings and tuples of them). Equal keys
            of a kind are the same value.
        shape: of the value.
        dtype: of the value.
    """
    return given_p.bind(kind=kind, key=key, shape=tuple(shape), dtype=np.dtype(dtype))


def arrived(value: Any) -> Any:
    """Names a value from which on others than the replicas compute; see step/split.py."""
    return mark_p.bind(value, kind="arrived", key=None)


def all_reduce(values: list[Any], ops: list[str], frame: Any) -> list[Any]:
    """Binds one all-reduce of several arrays for the strategy of `frame`."""
    strategy = frame.strategy
    if not values or strategy.num_replicas_in_sync == 1:
        return list(values)
    return all_reduce_p.bind(
        *values,
        ops=tuple(ops),
        via=strategy.cross_device_ops,
        replicas=strategy.num_replicas_in_sync,
        weight=cotangent_weight(frame),
    )


def cotangent_weight(frame: Any) -> float | None:
    """How a replica's loss counts in an uneven `fit` step: its share of the rows.

    There the loss of the batch is the sum over replicas of `weight * loss`, and gradients are
    weighted at the end; what flows back through a collective comes from the other replicas and
    must be weighted by their shares, not by the receiver's.
    """
    rows = frame.trace.rows
    return None if rows.even else rows.weight


def divide(total: jax.Array, count: Any) -> jax.Array:
    """`total / count` in total's dtype; integers become float32 (TF: float64)."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total / jnp.asarray(count, total.dtype)
    return total.astype(jnp.float32) / jnp.asarray(count, jnp.float32)


def _mean_dtype(aval: Any, op: str) -> Any:
    if op == "mean" and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.dtype("float32")
    return aval.dtype


@all_reduce_p.def_abstract_eval
def _all_reduce_abstract(*avals: Any, ops: tuple[str, ...], **_: Any) -> list[Any]:
    return [
        jax.core.ShapedArray(a.shape, _mean_dtype(a, op)) for a, op in zip(avals, ops, strict=True)
    ]


@all_gather_p.def_abstract_eval
def _all_gather_abstract(aval: Any, *, sizes: tuple[int, ...], **_: Any) -> Any:
    return jax.core.ShapedArray((sum(sizes), *aval.shape[1:]), aval.dtype)


@mark_p.def_abstract_eval
def _mark_abstract(aval: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


@given_p.def_abstract_eval
def _given_abstract(*, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(shape, dtype)


@replica_id_p.def_abstract_eval
def _replica_id_abstract() -> Any:
    return jax.core.ShapedArray((), jnp.dtype("int32"))


@tape_start_p.def_abstract_eval
def _tape_start_abstract(**_: Any) -> Any:
    return jax.core.ShapedArray((), jnp.dtype("int32"))


@gradient_p.def_abstract_eval
def _gradient_abstract(*avals: Any, targets: int, sources: int, **_: Any) -> list[Any]:
    return [
        jax.core.ShapedArray(a.shape, a.dtype) for a in avals[1 + targets : 1 + targets + sources]
    ]


def _all_reduce_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = all_reduce_p.bind(*primals, **params)
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    out_tangents = [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]
    if live:
        ops = tuple(params["ops"][i] for i in live)
        reduced = all_reduce_p.bind(*(tangents[i] for i in live), **{**params, "ops": ops})
        for i, tangent in zip(live, reduced, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _all_reduce_transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    # The gradient of an all-reduce is the same all-reduce of the gradient (of "first": the sum,
    # given to replica 0 alone).
    live = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    grads: list[Any] = [None] * len(operands)
    if live:
        ops = tuple("sum" if params["ops"][i] == "first" else params["ops"][i] for i in live)
        reduced = _reduce_cotangents([cotangents[i] for i in live], {**params, "ops": ops})
        for i, grad in zip(live, reduced, strict=True):
            if params["ops"][i] == "first":
                grad = jnp.where(replica_id_p.bind() == 0, grad, jnp.zeros_like(grad))
            grads[i] = grad
    return grads


def _reduce_cotangents(cotangents: list[Any], params: dict[str, Any]) -> list[Any]:
    weight = params["weight"]
    if weight is None:
        return all_reduce_p.bind(*cotangents, **params)
    weights = [jnp.asarray(weight, c.dtype) for c in cotangents]
    scaled = [c * w for c, w in zip(cotangents, weights, strict=True)]
    reduced = all_reduce_p.bind(*scaled, **params)
    return [r / w for r, w in zip(reduced, weights, strict=True)]


def _all_reduce_batch(args: Any, dims: Any, **params: Any) -> Any:
    return all_reduce_p.bind(*args, **params), dims


def _all_gather_transpose(
    cotangent: Any, operand: Any, *, sizes: tuple[int, ...], via: Any, weight: float | None
) -> Any:
    # TF: sum the upstream gradients of all replicas, then take the replica's own rows.
    if type(cotangent) is ad.Zero:
        return [None]
    params = {"ops": ("sum",), "via": via, "replicas": len(sizes), "weight": weight}
    (total,) = _reduce_cotangents([cotangent], params)
    starts = jnp.asarray(np.cumsum((0, *sizes[:-1])), jnp.int32)[replica_id_p.bind()]
    # dynamic_slice would move the window back where it passes the end; padding forbids that.
    padded = jnp.pad(total, [(0, max(sizes))] + [(0, 0)] * (total.ndim - 1))
    rows = operand.aval.shape[0]
    return [jax.lax.dynamic_slice_in_dim(padded, starts, rows, axis=0)]


def _all_gather_batch(args: Any, dims: Any, **params: Any) -> Any:
    (value,), (dim,) = args, dims  # rows stay in front, what is mapped goes last
    return all_gather_p.bind(jnp.moveaxis(value, dim, -1), **params), value.ndim - 1


ad.primitive_jvps[all_reduce_p] = _all_reduce_jvp
ad.primitive_transposes[all_reduce_p] = _all_reduce_transpose
batching.primitive_batchers[all_reduce_p] = _all_reduce_batch
batching.primitive_batchers[all_gather_p] = _all_gather_batch
ad.deflinear2(all_gather_p, _all_gather_transpose)


def _mark_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return mark_p.bind(*primals, **params), tangents[0]


ad.primitive_jvps[mark_p] = _mark_jvp
batching.primitive_batchers[mark_p] = lambda args, dims, **params: (
    mark_p.bind(*args, **params),
    dims[0],
)
