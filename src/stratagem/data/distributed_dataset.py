"""A dataset whose elements hold one part for each replica."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from stratagem import context
from stratagem.data.policy import AutoShardPolicy
from stratagem.errors import OutOfRangeError

logger = logging.getLogger("stratagem")

T = TypeVar("T")


class Step(NamedTuple):
    """What all replicas consume in one step.

    Args:
        element: structure of `PerReplica` (of plain arrays with one replica).
        rows: rows of each replica.
        first_rows: the first rows, or what identifies them; filled in on a pass's first step.
    """

    element: Any
    rows: tuple[int, ...]
    first_rows: tuple[Any, ...] = ()


class Feed(Protocol):
    """Where the steps of a distributed dataset come from."""

    policy: AutoShardPolicy
    how: str  # in words, for the log
    num_replicas: int
    cardinality: int | float | None

    def steps(self) -> Iterator[Step]:
        """Starts a pass. Raises at once when no pass is possible."""

    def element_spec(self) -> Any:
        """Structure of `PerReplicaSpec` (of `TensorSpec` with one replica)."""


@dataclasses.dataclass(frozen=True)
class WorkerInput:
    """What one worker was given, in the current pass over a distributed dataset.

    Args:
        worker: index of the worker.
        policy: shard policy taken.
        how: how rows reach the replicas, in words.
        steps: steps so far.
        rows: rows so far, all replicas of this worker.
        rows_per_replica: rows so far, by replica.
        first_rows: the first values of the first array of the pass, up to five; for arrays of
            more than one dimension a CRC-32 of each row. Workers that print the same see the
            same data.
    """

    worker: int
    policy: AutoShardPolicy
    how: str
    steps: int
    rows: int
    rows_per_replica: tuple[int, ...]
    first_rows: tuple[Any, ...]


class OptionalElement:
    """An element, or none: what `get_next_as_optional` returns."""

    __slots__ = ("_elements",)

    def __init__(self, *elements: Any):
        self._elements = elements

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """The element.

        Raises:
            OutOfRangeError: there is none.
        """
        if not self._elements:
            raise OutOfRangeError(
                "Expected an element. Got none: the dataset has ended. Ask has_value() first."
            )
        return self._elements[0]


class DistributedIterator:
    """One pass over a distributed dataset. Made by `iter(distributed_dataset)`."""

    def __init__(self, dataset: DistributedDataset, feed: Feed):
        self._dataset = dataset
        self._feed = feed
        self._steps = feed.steps()
        self._count = 0
        self._rows = [0] * feed.num_replicas
        self._first_rows: tuple[Any, ...] = ()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        if context.depth() and context.current().trace is not None:
            # The trace would take the first batch for a constant and never read another.
            raise ValueError(
                "Expected a distributed dataset to be read outside compiled functions. Got "
                "next(iterator) inside strategy.run or stratagem.function. Read the batch before, "
                "and pass it: strategy.run(fn, args=(next(iterator),))."
            )
        step = next(self._steps)
        if self._count == 0:
            self._first_rows = step.first_rows
        self._count += 1
        for replica, rows in enumerate(step.rows):
            self._rows[replica] += rows
        return step.element

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: the dataset has ended.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                f"Expected another element. Got the end of the dataset after {self._count} steps. "
                "Use a for loop, or get_next_as_optional()."
            ) from None

    def get_next_as_optional(self) -> OptionalElement:
        """The next element or, past the end, an optional without value."""
        for element in self:
            return OptionalElement(element)
        return OptionalElement()

    @property
    def element_spec(self) -> Any:
        """The spec of the elements; see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def describe(self) -> tuple[WorkerInput, ...]:
        """What each worker was given so far."""
        return (
            WorkerInput(
                worker=0,
                policy=self._feed.policy,
                how=self._feed.how,
                steps=self._count,
                rows=sum(self._rows),
                rows_per_replica=tuple(self._rows),
                first_rows=self._first_rows,
            ),
        )


class DistributedDataset:
    """An iterable whose elements hold one part for each replica, on that replica's device.

    Made by `experimental_distribute_dataset` and `distribute_datasets_from_function`. It can be
    iterated as often as the dataset it was made from. It has no `len`; see `cardinality`.
    """

    def __init__(self, feed: Feed):
        self._feed = feed
        self._latest: DistributedIterator | None = None
        self._spec: Any = None

    def __iter__(self) -> DistributedIterator:
        self._latest = DistributedIterator(self, self._feed)
        return self._latest

    @property
    def cardinality(self) -> int | float | None:
        """Steps of one pass; `math.inf` when it never ends, None when unknown."""
        return self._feed.cardinality

    @property
    def element_spec(self) -> Any:
        """Structure of `PerReplicaSpec`, of plain `TensorSpec` with one replica.

        The row axis is None unless all elements have the same number of rows and the replicas
        divide it. It may read the first element; a one-shot dataset still gives that element
        to the iterator.

        Raises:
            RuntimeError: the dataset can be read once, and was.
        """
        if self._spec is None:
            self._spec = self._feed.element_spec()
        return self._spec

    def reduce(self, initial_state: T, reduce_func: Callable[[T, Any], T]) -> T:
        """Folds all elements of a pass: `state = reduce_func(state, element)`.

        Args:
            initial_state: state before the first element.
            reduce_func: takes the state and an element, returns the next state.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def describe(self) -> tuple[WorkerInput, ...]:
        """What each worker was given so far, in the latest pass."""
        if self._latest is not None:
            return self._latest.describe()
        feed = self._feed
        none = (0,) * feed.num_replicas
        return (WorkerInput(0, feed.policy, feed.how, 0, 0, none, ()),)


def log_first_step(feed: Feed, rows: tuple[int, ...]) -> None:
    """Says once what a dataset's first batch became."""
    logger.info(
        "Input: policy %s, %s; 1 worker, %d replica%s; first batch of %d rows dealt as %s.",
        feed.policy.name,
        feed.how,
        feed.num_replicas,
        "" if feed.num_replicas == 1 else "s",
        sum(rows),
        "+".join(map(str, rows)),
    )
