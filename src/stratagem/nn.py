"""tf.nn's helpers for custom loops: losses of a global batch, and rows of tables by their ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> jax.Array:
    """Rows of a table (tf.nn.embedding_lookup).

    Inside a compiled step it is one gather of whole rows for each table or shard, so that a
    variable on parameter servers is pulled by row. Outside, a ShardedVariable is asked for the
    rows that are needed.

    Args:
        params: `[rows, ...]`: a variable, array or ShardedVariable; or a list of its shards, the
            rows dealt out in ranges that follow each other ("div").
        ids: integers of any shape, from 0 to rows - 1.
        max_norm: rows whose L2 norm is larger are scaled down to it.

    Returns:
        `[*ids.shape, ...]`. In a compiled step, where no id can be checked, the row of an id out
        of range is NaN (of integers their lowest value), as of `keras.ops.take`.

    Raises:
        TypeError: ids are not integers; or they are values of a compiled step and the table only
            exists outside.
        ValueError: an id is out of range; there is no shard, or one of another width or dtype.
    """
    shards = list(params) if isinstance(params, (list, tuple)) else [params]
    _check_shards(shards)
    ids = _checked_ids(ids, sum(shard.shape[0] for shard in shards))
    if len(shards) == 1:
        rows = _rows(shards[0], ids)
    else:
        rows, start = _invalid(ids.shape, shards[0]), 0
        for shard in shards:
            inside = (ids >= start) & (ids < start + shard.shape[0])
            if shard.shape[0]:
                found = _rows(shard, _only(inside, ids - start))
                rows = jnp.where(_wide(inside, rows), found, rows)
            start += shard.shape[0]
    return rows if max_norm is None else _clipped(rows, max_norm, jnp.ndim(ids))


def embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str = "mean",
    max_norm: float | None = None,
    *,
    row_splits: Any = None,
    row_ids: Any = None,
    num_rows: int | None = None,
) -> jax.Array:
    """Rows of a table, those of each example combined (tf.nn.embedding_lookup_sparse).

    Examples with different numbers of ids come in one of three forms:

    - ids `[batch, k]`, padded with -1;
    - ids `[n]` and row_splits `[batch + 1]`: example i has the ids from `row_splits[i]` to
      `row_splits[i + 1]`, as in `tf.RaggedTensor`;
    - ids `[n]` and row_ids `[n]`: the example of each id, as in `tf.SparseTensor`.

    Args:
        params: as of `embedding_lookup`.
        ids: integers.
        weights: of each id, in the shape of ids; None: 1.
        combiner: "sum": the weighted sum. "mean": that divided by the sum of the weights. "sqrtn":
            divided by the square root of the sum of the squares of the weights.
        max_norm: rows whose L2 norm is larger are scaled down to it before.
        row_splits: see above.
        row_ids: see above.
        num_rows: of examples, with row_ids; needed in a compiled step. None: as many as there are.

    Returns:
        `[batch, ...]`; zeros for an example without ids. bfloat16 and float16 are summed as
        float32; of a table of integers the result is float32.

    Raises:
        TypeError: ids are not integers.
        ValueError: the combiner is none of these, or shapes do not fit the form.
    """
    if combiner not in ("mean", "sum", "sqrtn"):
        raise ValueError(
            f"Expected combiner 'mean', 'sum' or 'sqrtn'. Got {combiner!r}. For others combine "
            "the rows of embedding_lookup."
        )
    ids = _integers(ids, "ids")
    together = _pooling(ids, row_splits, row_ids, num_rows)
    if weights is not None and np.shape(weights) != ids.shape:
        raise ValueError(
            f"Expected weights in the shape of ids, {ids.shape}. Got {np.shape(weights)}. Give "
            "each id one weight."
        )
    there = (ids != -1) | (ids.ndim == 1)
    rows = embedding_lookup(params, _only(there, ids), max_norm)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    weight = jnp.where(there, 1 if weights is None else weights, 0).astype(wide)
    # Not a product alone: the row that stands for padding may be infinite.
    total = together(jnp.where(_wide(there, rows), rows * _wide(weight, rows), 0))
    if combiner != "sum":
        divisor = together(weight if combiner == "mean" else jnp.square(weight))
        some = divisor != 0
        divisor = jnp.where(some, divisor, 1)
        if combiner == "sqrtn":
            divisor = jnp.sqrt(divisor)
        total = jnp.where(_wide(some, total), total / _wide(divisor, total), 0)
    return total.astype(rows.dtype if jnp.issubdtype(rows.dtype, jnp.inexact) else wide)


def _check_shards(shards: Sequence[Any]) -> None:
    kinds = [(tuple(shard.shape[1:]), jnp.dtype(shard.dtype).name) for shard in shards]
    if not shards or any(kind != kinds[0] for kind in kinds):
        got = ", ".join(f"{dtype} of shape {width}" for width, dtype in kinds) or "no shard"
        raise ValueError(
            f"Expected shards of one table, with rows of one shape and dtype. Got {got}. Pass the "
            "table's variable, or all of its shards in order."
        )


def _rows(table: Any, ids: Any) -> jax.Array:
    """Rows of a table or shard by ids of any shape."""
    if hasattr(table, "sparse_read"):
        if not isinstance(ids, jax.core.Tracer):
            rows = table.sparse_read(np.asarray(ids).reshape(-1))
            return jnp.reshape(rows, (*jnp.shape(ids), *jnp.shape(rows)[1:]))
        if not hasattr(table, "__jax_array__"):
            raise TypeError(
                f"Expected a table that a compiled step can read. Got {table!r} and ids of a "
                "step. Pass the Keras variable."
            )
    if not np.size(ids):  # of no ids `at` makes a constant, which has no gradient
        return jnp.take(jnp.asarray(table), ids, axis=0)
    return jnp.asarray(table).at[ids].get(mode="fill", wrap_negative_indices=False)


def _only(wanted: Any, ids: Any) -> Any:
    """Ids with another one of the wanted ids in place of each that is not.

    Row 0 would do for the values, but an optimizer of touched rows would change it.
    """
    where = np.where if isinstance(ids, np.ndarray) else jnp.where  # known ids stay known
    chosen = where(wanted, ids, 0)
    return where(wanted, ids, chosen.max(initial=0))


def _invalid(shape: tuple[int, ...], table: Any) -> jax.Array:
    """What `_rows` gives for ids that are out of range."""
    dtype = jnp.dtype(table.dtype)
    fill = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
    return jnp.full((*shape, *table.shape[1:]), fill, dtype)


def _clipped(rows: jax.Array, max_norm: float, ids_rank: int) -> jax.Array:
    """Rows `[*ids, ...]` with an L2 norm of at most max_norm each."""
    axes = tuple(range(ids_rank, rows.ndim))
    squares = jnp.sum(jnp.square(rows), axes, keepdims=True)
    some = squares > 0  # the root has no gradient at zero
    norm = jnp.sqrt(jnp.where(some, squares, 1))
    return jnp.where(some & (norm > max_norm), rows * (max_norm / norm), rows)


def _wide(flags: Any, like: Any) -> jax.Array:
    """Values of the first axes in a shape that broadcasts to all."""
    return jnp.reshape(flags, (*jnp.shape(flags), *(1,) * (jnp.ndim(like) - jnp.ndim(flags))))


def _integers(values: Any, name: str) -> Any:
    """As a NumPy array where the values are known, else as they are."""
    array = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if isinstance(values, (list, tuple)) and not array.size:
        return array.astype(np.int32)  # a list without elements
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"Expected {name} of an integer dtype. Got {array.dtype}. Convert them, or look "
            "strings and floats up in a vocabulary first."
        )
    return array


def _checked_ids(ids: Any, rows: int) -> Any:
    ids = _integers(ids, "ids")
    if isinstance(ids, np.ndarray) and ids.size:
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= rows:
            raise ValueError(
                f"Expected ids from 0 to {rows - 1}, the rows of the table. Got "
                f"{lowest if lowest < 0 else highest}. Look ids up in a vocabulary first, or "
                "make the table larger."
            )
    return ids


def _pooling(ids: Any, row_splits: Any, row_ids: Any, num_rows: Any) -> Callable[[Any], Any]:
    """A function that adds up what belongs to the ids of each example."""
    forms = (row_splits is not None) + (row_ids is not None)
    if forms > 1 or ids.ndim != (1 if forms else 2) or (num_rows is not None and row_ids is None):
        raise ValueError(
            "Expected ids [batch, k], or ids [n] with either row_splits or row_ids (and num_rows "
            f"only with row_ids). Got ids of shape {ids.shape}, row_splits "
            f"{_shape(row_splits)}, row_ids {_shape(row_ids)}, num_rows {num_rows}. Use one form."
        )
    if not forms:
        return lambda values: jnp.sum(values, axis=1)
    if row_splits is not None:
        splits = _checked_splits(row_splits, ids.shape[0])
        example = jnp.searchsorted(splits[1:], jnp.arange(ids.shape[0]), side="right")
        return lambda values: jax.ops.segment_sum(values, example, splits.shape[0] - 1)
    example = _integers(row_ids, "row_ids")
    if example.shape != ids.shape:
        raise ValueError(
            f"Expected one of row_ids for each of {ids.shape[0]} ids. Got shape {example.shape}. "
            "Give each id the number of its example."
        )
    if num_rows is None:
        if not isinstance(example, np.ndarray):
            raise ValueError(
                "Expected num_rows in a compiled step, where shapes must be known. Got row_ids "
                "alone. Pass num_rows=batch."
            )
        num_rows = int(example.max()) + 1 if example.size else 0
    return lambda values: jax.ops.segment_sum(values, example, num_rows)


def _checked_splits(row_splits: Any, ids: int) -> Any:
    splits = _integers(row_splits, "row_splits")
    if splits.ndim != 1 or splits.shape[0] == 0:
        raise ValueError(
            f"Expected row_splits of shape [batch + 1]. Got {splits.shape}. Start them with 0 and "
            "end them with the number of ids."
        )
    if isinstance(splits, np.ndarray) and not (
        splits[0] == 0 and splits[-1] == ids and np.all(splits[1:] >= splits[:-1])
    ):
        raise ValueError(
            f"Expected row_splits that go up from 0 to {ids}, the number of ids. Got "
            f"{splits[:8].tolist()}{'' if len(splits) <= 8 else '...'}. Count the ids of each "
            "example."
        )
    return splits


def _shape(value: Any) -> str:
    return "None" if value is None else f"of shape {np.shape(value)}"


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
