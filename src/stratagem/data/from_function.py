"""Deals whole elements of a user's dataset function to the replicas, and values of a function."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from stratagem.data.adapt import Source, adapt
from stratagem.data.batch import Element, check_structure, read_element
from stratagem.data.distributed_dataset import DistributedDataset, Step, log_first_step
from stratagem.data.from_dataset import first_rows
from stratagem.data.placement import Placement
from stratagem.data.policy import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    check_input_options,
)
from stratagem.data.spec import distribute_spec, spec_of
from stratagem.values import regroup

logger = logging.getLogger("stratagem")

# Where a dataset's iteration runs; a function, since such a context is entered anew each time.
Where = Callable[[], contextlib.AbstractContextManager[Any]]


class DealtFeed:
    """A `Feed` that gives element i of a source to one replica, whole.

    With one source, element i goes to replica `i mod replicas`; with one source a replica, each
    reads its own. When some replicas have an element and others do not, those get one with zero
    rows. Where that is impossible (static shapes, or no row axis) the step is dropped, as in TF,
    with a warning.
    """

    policy = AutoShardPolicy.OFF  # the function has shared the data out itself

    def __init__(self, sources: list[Source], places: list[Where], placement: Placement):
        self.num_replicas = placement.num_replicas
        self._sources = sources
        self._places = places
        self._placement = placement
        self._shared = len(sources) == 1
        self._static = all(source.static_rows for source in sources)
        self._logged = False
        self.how = "whole elements of the dataset function"
        self.cardinality = self._cardinality()

    def _cardinality(self) -> int | float | None:
        lengths = [source.cardinality for source in self._sources]
        if self._shared:
            lengths = [n and n / self.num_replicas for n in lengths]
        known = [n for n in lengths if n is not None]
        if len(known) < len(lengths):
            return None
        full = min(known) if min(known) == math.inf else math.floor(min(known))
        some = max(known) if max(known) == math.inf else math.ceil(max(known))
        if full == some or self._static:
            return full
        # Whether the last steps can be padded is known before the first element only by a spec.
        specs = [jax.tree.leaves(source.spec) for source in self._sources]
        return some if all(s and all(leaf.shape for leaf in s) for s in specs) else None

    def steps(self) -> Iterator[Step]:
        """Starts a pass; a one-shot source refuses a second one here."""
        passes = []
        for source, where in zip(self._sources, self._places, strict=True):
            with where():
                passes.append(source.open())
        return self._steps(passes)

    def _steps(self, passes: list[Iterator[Any]]) -> Iterator[Step]:
        if self._shared:
            readers = passes * self.num_replicas
            places = self._places * self.num_replicas
        else:
            readers, places = passes, self._places
        first: Element | None = None
        index = 0
        while True:
            parts: list[Element | None] = []
            for reader, where in zip(readers, places, strict=True):
                with where():
                    parts.append(_next(reader, index))
                if parts[-1] is not None:
                    first = parts[-1] if first is None else first
                    check_structure(first.treedef, parts[-1].treedef, index)
                    index += 1
            present = [part for part in parts if part is not None]
            if first is None:
                raise self._sources[0].empty()
            if not present:
                return
            if len(present) < len(parts) and not self._can_pad(present[0]):
                self._warn_dropped(len(present))
                return
            filled = [_zero_rows(present[0]) if part is None else part for part in parts]
            step = self._step(filled, is_first=present[0] is first)
            if not self._logged:
                log_first_step(self, step.rows)
                self._logged = True
            yield step

    def _step(self, parts: list[Element], is_first: bool) -> Step:
        columns = zip(*(part.leaves for part in parts), strict=True)
        element = parts[0].treedef.unflatten([self._placement.deal(column) for column in columns])
        firsts = [part.leaves[0] for part in parts]
        rows = tuple(leaf.shape[0] if leaf.shape else 1 for leaf in firsts)
        return Step(element, rows, first_rows(firsts[0]) if is_first else ())

    def _can_pad(self, part: Element) -> bool:
        return not self._static and all(leaf.shape for leaf in part.leaves)

    def _warn_dropped(self, count: int) -> None:
        logger.warning(
            "Input: the last %d element%s of the dataset function went unused: %d replicas cannot "
            "share them, and elements of a fixed shape cannot be left empty. Use batches without "
            "drop_remainder, or a number of elements that the replicas divide.",
            count,
            "" if count == 1 else "s",
            self.num_replicas,
        )

    def element_spec(self) -> Any:
        """From the dataset's own spec where it has one, else from its first element."""
        source = self._sources[0]
        spec = source.spec
        if spec is None:
            with self._places[0]():
                leaves, treedef = read_element(source.first(), 0)
            spec = treedef.unflatten([spec_of(leaf, static_rows=self._static) for leaf in leaves])
        return distribute_spec(spec, self.num_replicas, split=False)


def _next(reader: Iterator[Any], index: int) -> Element | None:
    for element in reader:
        return read_element(element, index)
    return None


def _zero_rows(like: Element) -> Element:
    leaves = [np.zeros((0, *leaf.shape[1:]), leaf.dtype) for leaf in like.leaves]
    return Element(leaves, like.treedef)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    *,
    mesh: Mesh,
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Distributes what a function makes: `Strategy.distribute_datasets_from_function`.

    Args:
        dataset_fn: takes an `InputContext`, returns a dataset whose elements are one replica's
            batches. It is called here, once per worker or (PER_REPLICA) once per replica.
        mesh: the replicas' devices, one axis "replica".
        options: how to feed.

    Returns:
        A dataset; element i of a worker's dataset is replica `i mod replicas`'s part of step
        `i // replicas`. Nothing is split or batched again.

    Raises:
        TypeError: `dataset_fn` is not callable, or does not return a dataset.
        ValueError: options that contradict each other.
    """
    options = InputOptions() if options is None else options
    check_input_options(options, from_function=True)
    if not callable(dataset_fn):
        raise TypeError(
            "Expected a function that takes an InputContext and returns a dataset. Got "
            f"{type(dataset_fn).__name__}. Use experimental_distribute_dataset for a dataset."
        )
    placement = Placement(mesh, to_device=options.experimental_fetch_to_device)
    replicas = placement.num_replicas
    pipelines = 1
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        pipelines = replicas
    places: list[Where] = [contextlib.nullcontext] * pipelines
    if options.experimental_place_dataset_on_device:
        places = [_on(device) for device in placement.devices]
    sources = []
    for pipeline, where in enumerate(places):
        with where():
            sources.append(adapt(dataset_fn(InputContext(pipelines, pipeline, replicas))))
    return DistributedDataset(DealtFeed(sources, places, placement))


def _on(device: jax.Device) -> Where:
    return lambda: jax.default_device(device)


def values_from_function(value_fn: Callable[[ValueContext], Any], num_replicas: int) -> Any:
    """Makes one value a replica: `Strategy.experimental_distribute_values_from_function`.

    Args:
        value_fn: takes a `ValueContext`, returns that replica's value.
        num_replicas: replicas to make values for.

    Returns:
        A `PerReplica`, also when all values are equal, for each leaf of a structure; with one
        replica the value itself.

    Raises:
        ValueError: the replicas' values differ in structure.
    """
    values = [value_fn(ValueContext(i, num_replicas)) for i in range(num_replicas)]
    return values[0] if num_replicas == 1 else regroup(values)
