"""Reduces and broadcasts distributed values at once, outside a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stratagem import config
from stratagem.errors import UnevenShapesError
from stratagem.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, ReduceOp

if TYPE_CHECKING:
    from stratagem.collectives.abstract import CrossDeviceOps

_AXIS = "replica"


def as_distributed(value: Any) -> DistributedValues:
    """Takes a plain value for the value of the only replica."""
    return value if isinstance(value, DistributedValues) else PerReplica([value])


def check_destinations(destinations: Any) -> None:
    """Raises ValueError if there are none."""
    empty = isinstance(destinations, (list, tuple)) and not destinations
    if destinations is None or empty:
        raise ValueError(
            f"Expected destinations: a distributed value, a device string, a list of device "
            f"strings, or an array. Got {destinations!r}. To leave the result where the values "
            f"are, pass the value itself."
        )


def check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Returns the list of `(value, destinations)`, or raises and names all that are not."""
    if not isinstance(pairs, (list, tuple)):
        raise TypeError(
            f"Expected value_destination_pairs as a list of (value, destinations). Got "
            f"{type(pairs).__name__}."
        )
    wrong = [
        f"[{i}]: {type(pair).__name__}"
        for i, pair in enumerate(pairs)
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2)
    ]
    if wrong:
        raise ValueError(
            f"Expected value_destination_pairs as a list of (value, destinations). Got at "
            f"{', '.join(wrong)}. Pair each value with where its result shall go."
        )
    return [(value, destinations) for value, destinations in pairs]


def reduce_all(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    pairs: Sequence[tuple[DistributedValues, Any]],
    options: Any,
) -> list[Any]:
    """Reduces the values of all pairs with one `ops.all_reduce`, and puts each where it goes.

    Args:
        ops: the algorithm.
        reduce_op: SUM or MEAN.
        pairs: `(value, destinations)`.
        options: must be None.

    Returns:
        The results in order. The sum of IndexedSlices is one IndexedSlices with the rows of all
        replicas, in replica order; they are moved, not summed, whatever the algorithm.
    """
    if options is not None:
        raise ValueError(
            f"Expected no options for {type(ops).__name__}, which takes its settings when it is "
            f"made. Got {options!r}. Leave options out."
        )
    sparse = {i: _slices(i, value) for i, (value, _) in enumerate(pairs) if _is_sparse(value)}
    dense = {
        i: [jnp.asarray(part) for part in value.values]
        for i, (value, _) in enumerate(pairs)
        if i not in sparse
    }
    totals: dict[int, Any] = {i: _concatenate(slices) for i, slices in sparse.items()}
    if dense:
        _check_parts(dense)
        totals.update(zip(dense, _all_reduce(ops, list(dense.values())), strict=True))
    results = []
    for i, (value, destinations) in enumerate(pairs):
        total = totals[i]
        if reduce_op is ReduceOp.MEAN:
            total = _divide(total, len(value.values))
        results.append(place(total, destinations))
    return results


def place(array: Any, destinations: Any) -> Any:
    """Copies an array (or IndexedSlices) to destinations that `CrossDeviceOps.reduce` describes."""
    if isinstance(destinations, DistributedValues):
        return Mirrored([jax.device_put(array, _home(part)) for part in destinations.values])
    if isinstance(destinations, (str, jax.Device)):
        return jax.device_put(array, config.resolve_device(destinations))
    if isinstance(destinations, (list, tuple)):
        copies = [jax.device_put(array, d) for d in config.resolve_devices(destinations)]
        return copies[0] if len(copies) == 1 else Mirrored(copies)
    return jax.device_put(array, _home(destinations))


def _home(target: Any) -> Any:
    """Where an array or a variable lives; JAX's default device for what is not on any."""
    if isinstance(target, IndexedSlices):
        target = jnp.asarray(target.values)
    value = getattr(target, "value", target)
    if isinstance(value, jax.Array) and value.sharding.is_fully_replicated:
        return value.sharding
    if isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        if not isinstance(value, jax.Array):
            return None
        raise ValueError(
            f"Expected a destination that is whole on each of its devices. Got an array of shape "
            f"{list(value.shape)} that is split over {len(value.sharding.device_set)} devices. "
            f"Pass a distributed value or device strings."
        )
    raise TypeError(
        f"Expected destinations: a distributed value, a device string, a list of device strings, "
        f"or an array. Got {type(target).__name__}."
    )


def _is_sparse(value: DistributedValues) -> bool:
    return any(isinstance(part, IndexedSlices) for part in value.values)


def _slices(i: int, value: DistributedValues) -> list[IndexedSlices]:
    """Returns the parts of value `i`, or raises if they are not all rows of one tensor."""
    kinds = []
    for part in value.values:
        if isinstance(part, IndexedSlices):
            rows = jnp.asarray(part.values)
            dense_shape = None if part.dense_shape is None else list(part.dense_shape)
            kinds.append(f"rows {rows.dtype}{list(rows.shape[1:])} of {dense_shape}")
        else:
            kinds.append(type(part).__name__)
    if len(set(kinds)) > 1:
        raise UnevenShapesError(
            f"Expected IndexedSlices of rows of one tensor on all replicas. Got value {i}: "
            + ", ".join(f"replica {r} {kind}" for r, kind in enumerate(kinds))
            + ". Use IndexedSlices with equal rows and dense_shape, or call to_dense() first."
        )
    return list(value.values)


def _concatenate(slices: list[IndexedSlices]) -> IndexedSlices:
    """All rows on the device of the first ones."""
    home = _home(jnp.asarray(slices[0].values))
    values, indices = (
        jnp.concatenate([jax.device_put(jnp.asarray(part), home) for part in parts])
        for parts in ([s.values for s in slices], [s.indices for s in slices])
    )
    return IndexedSlices(values, indices, slices[0].dense_shape)


def _divide(total: Any, replicas: int) -> Any:
    if isinstance(total, IndexedSlices):
        return IndexedSlices(total.values / replicas, total.indices, total.dense_shape)
    return total / replicas


def _check_parts(parts: dict[int, list[jax.Array]]) -> None:
    """Raises unless the replicas agree on each value's shape and dtype, and on their number."""
    uneven = []
    for i, part in parts.items():
        kinds = [f"{p.dtype}{list(p.shape)}" for p in part]
        if len(set(kinds)) > 1:
            uneven.append(
                f"value {i}: " + ", ".join(f"replica {r} {k}" for r, k in enumerate(kinds))
            )
    if uneven:
        raise UnevenShapesError(
            f"Expected equal shapes and dtypes on all replicas. Got {'; '.join(uneven)}. Pad the "
            f"values, or gather them instead."
        )
    counts = {i: len(part) for i, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"Expected values of equally many replicas in one batch. Got "
            f"{', '.join(f'value {i}: {n}' for i, n in counts.items())}. Reduce them one by one."
        )


def _all_reduce(ops: CrossDeviceOps, parts: list[list[jax.Array]]) -> list[jax.Array]:
    """Sums each list of parts over a mesh of as many devices; returns replica 0's copies."""
    devices = _devices_for(parts)
    mesh = Mesh(np.array(devices), (_AXIS,))
    sharding = NamedSharding(mesh, P(_AXIS))
    stacked = [
        jax.make_array_from_single_device_arrays(
            (len(part), *part[0].shape),
            sharding,
            [jax.device_put(p[None], d) for p, d in zip(part, devices, strict=True)],
        )
        for part in parts
    ]
    sums = _program(ops, mesh)(*stacked)
    return [total.addressable_data(0) for total in sums]


@functools.lru_cache(maxsize=64)
def _program(ops: CrossDeviceOps, mesh: Mesh) -> Callable[..., tuple[jax.Array, ...]]:
    placed = ops.placed_on(list(mesh.devices.flat))

    def step(*stacked: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(placed.all_reduce([x[0] for x in stacked], _AXIS, mesh.size))

    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P(_AXIS), out_specs=P(), check_vma=False)
    )


def _devices_for(parts: list[list[jax.Array]]) -> list[jax.Device]:
    """The devices the parts are on, if there is one a replica; else the first ones there are."""
    replicas = len(parts[0])
    for part in parts:
        on = [p.device for p in part if isinstance(p.device, jax.Device)]
        if len(set(on)) == replicas and len({d.platform for d in on}) == 1:
            return on
    there = config.resolve_devices()
    if len(there) < replicas:
        raise ValueError(
            f"Expected a device for each of {replicas} replicas. Got {len(there)}: "
            f"{[config.device_name(d) for d in there]}. Reduce fewer values, or make virtual "
            f"devices at the start of the program with "
            f"stratagem.config.set_virtual_devices({replicas})."
        )
    return there[:replicas]
