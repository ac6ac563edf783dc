"""Deals whole elements of a user's dataset function to the replicas, and values of a function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from stratagem.cluster.runtime import Job
from stratagem.data.adapt import adapt
from stratagem.data.deal_feed import DealFeed, Where
from stratagem.data.distributed_dataset import DistributedDataset
from stratagem.data.placement import Placement
from stratagem.data.policy import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    check_input_options,
)
from stratagem.data.workers import Workers
from stratagem.values import regroup


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    *,
    mesh: Mesh,
    options: InputOptions | None = None,
    job: Job | None = None,
) -> DistributedDataset:
    """Distributes what a function makes: `Strategy.distribute_datasets_from_function`.

    Args:
        dataset_fn: takes an `InputContext`, returns a dataset whose elements are one replica's
            batches. It is called here, once per worker or (PER_REPLICA) once per replica.
        mesh: the replicas' devices, one axis "replica".
        options: how to feed.
        job: the processes that train together; None for one alone. Every process calls this, and
            iterates the result alike. Its dataset is then read in a thread, two steps ahead.

    Returns:
        A dataset; element i of a worker's dataset is the part of that worker's replica
        `i mod its replicas` in step `i // its replicas`. Nothing is split or batched again.
        Workers that run out take part with zero rows, until all have.

    Raises:
        TypeError: `dataset_fn` is not callable, or does not return a dataset.
        ValueError: options that contradict each other.
        JobMismatchError: at the first steps, when the workers' elements differ in structure.
        RuntimeError: another worker's dataset failed.
    """
    options = InputOptions() if options is None else options
    check_input_options(options, from_function=True)
    if not callable(dataset_fn):
        raise TypeError(
            "Expected a function that takes an InputContext and returns a dataset. Got "
            f"{type(dataset_fn).__name__}. Use experimental_distribute_dataset for a dataset."
        )
    placement = Placement(mesh, to_device=options.experimental_fetch_to_device)
    workers = Workers(job)
    contexts = [InputContext(workers.count, workers.index, placement.num_replicas)]
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        count = placement.num_replicas
        contexts = [InputContext(count, replica, count) for replica in placement.local]
    places: list[Where] = [contextlib.nullcontext] * len(contexts)
    if options.experimental_place_dataset_on_device:
        places = [_on(device) for device in placement.devices]
    sources = []
    for context, where in zip(contexts, places, strict=True):
        with where():
            sources.append(adapt(dataset_fn(context)))
    how = "whole elements of the dataset function"
    return DistributedDataset(DealFeed(sources, placement, workers, places, how))


def _on(device: jax.Device) -> Where:
    return lambda: jax.default_device(device)


def values_from_function(
    value_fn: Callable[[ValueContext], Any], num_replicas: int, local: range | None = None
) -> Any:
    """Makes one value a replica: `Strategy.experimental_distribute_values_from_function`.

    Args:
        value_fn: takes a `ValueContext`, returns that replica's value.
        num_replicas: replicas of the job.
        local: those of this process, whose values are made; None for all.

    Returns:
        A `PerReplica`, also when all values are equal, for each leaf of a structure; with one
        replica the value itself.

    Raises:
        ValueError: the replicas' values differ in structure.
    """
    local = range(num_replicas) if local is None else local
    values = [value_fn(ValueContext(i, num_replicas)) for i in local]
    return values[0] if num_replicas == 1 else regroup(values)
