"""Losses of a replica's rows are shares of the global batch's loss.

Keras divides a loss by what the replica holds. In `run`, as under TF, the result is scaled so that
the sum over replicas is the loss of the global batch; in `fit` gradients and losses are averaged
by rows afterwards, so only what is not a mean over rows needs a correction here. So it is for the
parts of a batch that workers take.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from keras import ops

from stratagem import _keras, context
from stratagem.keras_bridge import of_parts
from stratagem.keras_bridge.hooks import replicated_trace, wrap
from stratagem.step import primitives

_MEANS = ("sum_over_batch_size", "mean")


def install() -> None:
    """Attaches the bridge to Keras' loss reduction."""
    wrap(_keras.loss_module, "reduce_values", _reduce_values)
    wrap(_keras.loss_module, "apply_mask", _apply_mask)


def _reduce_values(
    original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
) -> Any:
    frame, part = replicated_trace(), of_parts.divisors()
    by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if frame is None and part is not None and by_weight and values.shape:
        weight = ops.cast(ops.sum(sample_weight), values.dtype)
        return ops.divide_no_nan(ops.sum(values), part.of(weight, values.shape[0]))
    if frame is None or reduction in (None, "none") or not values.shape:
        return original(values, sample_weight, reduction)
    weight = frame.trace.rows.weight
    if by_weight:
        total = _total(ops.cast(ops.sum(sample_weight), values.dtype), frame)
        loss, share = ops.divide_no_nan(ops.sum(values), total), 1.0
    elif reduction == "sum":
        loss, share = ops.sum(values), 1.0
    else:
        loss, share = original(values, sample_weight, reduction), _share(values.shape[0], frame)
    factor = share if weight is None else share / weight
    return loss if factor == 1.0 else loss * jnp.asarray(factor, loss.dtype)


def _apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    frame, part = replicated_trace(), of_parts.divisors()
    if mask is None or reduction not in _MEANS:
        return original(sample_weight, mask, dtype, reduction)
    # Keras weighs valid entries by total/valid; both must be those of the global batch.
    own = ops.sum(ops.cast(mask, dtype))
    if frame is not None:
        valid, share = _total(own, frame), _share(mask.shape[0], frame)
        total = jnp.asarray(mask.size / share if share else 0.0, dtype)
    elif part is not None:
        valid, total = part.of(own, mask.shape[0]), jnp.asarray(mask.size, dtype)
    else:
        return original(sample_weight, mask, dtype, reduction)
    weights = ops.where(ops.cast(mask, "bool"), ops.divide_no_nan(total, valid), 0)
    return original(sample_weight, weights, dtype, "sum")


def _total(value: Any, frame: context.Frame) -> Any:
    (total,) = primitives.all_reduce([value], ["sum"], frame)
    return total


def _share(rows: int, frame: context.Frame) -> float:
    """The part of all replicas' rows that this one holds."""
    everywhere = sum(frame.trace.exchange(rows))
    return rows / everywhere if everywhere else 0.0
