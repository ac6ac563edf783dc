"""Losses of a global batch, computed on a replica: tf.nn's helpers for custom loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stratagem import context


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """This replica's share of the global batch's mean loss; sum the shares over the replicas.

    Args:
        per_example_loss: `[rows, ...]`, the losses of the replica's rows.
        sample_weight: `[rows]` or broadcastable, multiplies the losses.
        global_batch_size: what to divide by, an integer. None divides by the rows that are really
            there on all replicas, so that a short last batch keeps its mean (TF: the replica's
            rows times the number of replicas).

    Returns:
        A scalar: the (weighted) sum of the losses divided by the global batch size; 0 for size 0.

    Raises:
        ValueError: per_example_loss is a scalar, or global_batch_size is not.
        TypeError: global_batch_size is not an integer.
        RuntimeError: called in cross-replica context without global_batch_size.
    """
    losses = jnp.asarray(per_example_loss)
    if not losses.ndim:
        raise ValueError(
            "Expected per_example_loss with one loss a row. Got a scalar. Create the loss with "
            "reduction='none'."
        )
    if sample_weight is not None:
        weights = jnp.asarray(sample_weight, losses.dtype)
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    frame = context.current()
    if global_batch_size is None:
        size: Any = _global_rows(losses.shape[0], frame)
    else:
        size = _checked_size(global_batch_size)
    total = jnp.sum(losses)
    size = jnp.asarray(size, total.dtype)
    loss = jnp.where(size == 0, jnp.zeros_like(total), total / jnp.where(size == 0, 1, size))
    return loss / jnp.asarray(_fit_weight(frame), loss.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's share of a loss that is the same on all replicas, so that it counts once.

    Args:
        regularization_loss: any shape, such as the stacked `model.losses`.

    Returns:
        A scalar: its sum divided by the number of replicas.

    Raises:
        RuntimeError: called in cross-replica context.
    """
    frame = context.current()
    if frame.replica is None:
        raise RuntimeError(_cross_replica("scale_regularization_loss"))
    total = jnp.sum(jnp.asarray(regularization_loss))
    if frame.trace is not None and frame.trace.rows.weight is not None:
        return total  # fit averages losses over replicas, which counts it once
    return total / jnp.asarray(frame.strategy.num_replicas_in_sync, total.dtype)


def _global_rows(rows: int, frame: context.Frame) -> int:
    if frame.replica is None:
        raise RuntimeError(_cross_replica("compute_average_loss without global_batch_size"))
    if frame.trace is None:
        return rows
    return sum(frame.trace.exchange(rows))


def _fit_weight(frame: context.Frame) -> float:
    """`fit` averages losses by rows: a share of the mean must be undone by its weight."""
    if frame.trace is None or frame.trace.rows.weight is None:
        return 1.0
    return frame.trace.rows.weight


def _checked_size(size: Any) -> Any:
    array = jnp.asarray(size)
    if array.ndim:
        raise ValueError(f"Expected a scalar global_batch_size. Got shape {array.shape}.")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"Expected an integer global_batch_size. Got dtype {array.dtype}.")
    return array


def _cross_replica(what: str) -> str:
    return (
        f"Expected {what} inside a replica function. Got a call in cross-replica context. Call it "
        "in the function that strategy.run calls."
    )
