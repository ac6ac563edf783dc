"""A dataset whose elements hold one part for each replica."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from jax.sharding import Mesh

from stratagem import context
from stratagem.cluster.runtime import Job
from stratagem.data.placement import Placement
from stratagem.data.policy import AutoShardPolicy
from stratagem.data.workers import Workers
from stratagem.errors import GroupChangedError, OutOfRangeError, ReadInsideProgramError

logger = logging.getLogger("stratagem")

T = TypeVar("T")


class Step(NamedTuple):
    """What the replicas of this worker consume in one step.

    Args:
        element: structure of `PerReplica` (of plain arrays with one replica).
        rows: rows of each replica of the job.
        first_rows: this worker's first rows, or what identifies them; on a pass's first step.
    """

    element: Any
    rows: tuple[int, ...]
    first_rows: tuple[Any, ...] = ()


class Steps(Protocol):
    """One pass over the steps of a distributed dataset."""

    def __next__(self) -> Step:
        """The next step."""

    def get_state(self) -> Any:
        """Where the pass is, as JSON can hold it."""

    def set_state(self, state: Any) -> None:
        """Goes on from there: the next step is the one after those given before `get_state`."""

    def redistribute(self, again: bool) -> None:
        """The same feed has new replicas: deals the next step to them.

        Args:
            again: the next step is the one that was given last.
        """

    def position(self, again: bool) -> Any:
        """A state for the steps of the feed that takes this one's place; `again` as above."""

    def close(self) -> None:
        """Ends the pass before its end."""


class Feed(Protocol):
    """Where the steps of a distributed dataset come from."""

    policy: AutoShardPolicy
    placement: Placement
    workers: Workers
    cardinality: int | float | None

    @property
    def how(self) -> str:
        """In words, for the log."""

    @property
    def follows(self) -> bool:
        """Whether it can go on with other workers in the middle of a step, asking none of them."""

    def steps(self) -> Steps:
        """Starts a pass. Raises at once when no pass is possible."""

    def element_spec(self) -> Any:
        """Structure of `PerReplicaSpec` (of `TensorSpec` with one replica)."""

    def redistribute(self, placement: Placement, workers: Workers) -> Feed:
        """The feed that deals all later steps to other replicas: this one, or another.

        Raises:
            NotImplementedError: there is none.
        """


@dataclasses.dataclass(frozen=True)
class WorkerInput:
    """What one worker was given, in the current pass over a distributed dataset.

    Args:
        worker: index of the worker.
        policy: shard policy taken.
        how: how rows reach the replicas, in words.
        steps: steps so far.
        rows: rows so far, all replicas of this worker.
        rows_per_replica: rows so far, by replica of this worker.
        first_rows: the first values that this worker has of the first array of the pass, up to
            five; for arrays of more than one dimension a CRC-32 of each row. Workers that print
            the same see the same data.
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


def refuse_inside_program() -> None:
    """Refuses to read: a trace would take the first batch for a constant and never read another.

    Raises:
        ReadInsideProgramError: inside strategy.run or stratagem.function.
    """
    if context.depth() and context.current().trace is not None:
        raise ReadInsideProgramError(
            "Expected a dataset to be read outside compiled functions. Got next(iterator) inside "
            "strategy.run or stratagem.function. Read the batch before, and pass it: "
            "strategy.run(fn, args=(next(iterator),))."
        )


@dataclasses.dataclass
class _Progress:
    """What a pass gave so far, outliving its iterator."""

    rows: list[int]  # by replica of this worker
    steps: int = 0
    first_rows: tuple[Any, ...] = ()


class DistributedIterator:
    """One pass over a distributed dataset. Made by `iter(distributed_dataset)`."""

    def __init__(self, dataset: DistributedDataset, feed: Feed):
        self._dataset = dataset
        self._feed = feed
        self._steps = feed.steps()
        self._progress = _Progress([0] * len(feed.placement.local))

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        refuse_inside_program()
        step = next(self._steps)
        progress = self._progress
        progress.first_rows = step.first_rows or progress.first_rows
        progress.steps += 1
        for i, replica in enumerate(self._feed.placement.local):
            progress.rows[i] += step.rows[replica]
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
                "Expected another element. Got the end of the dataset after "
                f"{self._progress.steps} steps. Use a for loop, or get_next_as_optional()."
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
        """What this worker was given so far."""
        return (_describe(self._feed, self._progress),)

    def get_state(self) -> dict[str, Any]:
        """Where the pass is, as JSON can hold it. Every process has its own."""
        return {"step": self._progress.steps, "source": self._steps.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state of `get_state`, in this program or another run of it.

        Sources with a position of their own (`batches`, `from_files`, Grain) are put there, also
        with another number of workers. Of others the elements before are read and dropped.
        Every process calls it.

        Raises:
            RuntimeError: a source that can be read once was read.
            ValueError: the source ends before the state's step.
            NotImplementedError: another number of workers, where each has data of its own.
        """
        self._steps.set_state(state["source"])
        self._restart(state["step"])

    def redistribute(self, mesh: Mesh, job: Job | None = None, *, again: bool = False) -> None:
        """Deals the steps that follow to other replicas: the same global batches, other shares.

        For training that goes on with other workers in the middle of a pass. Later passes over
        the dataset are dealt to them too. Every process of the new job calls it, at the same step.
        `describe` counts rows from here on.

        Args:
            mesh: the devices of all replicas, one axis "replica".
            job: the processes that train together from now on.
            again: the step given last, which was lost, is the next one.

        Raises:
            NotImplementedError: each worker has data of its own, which the others cannot read.
            ValueError: no step was given that could be given again; or the dataset's policy does
                not suit that many workers.
        """
        placement = Placement(mesh, to_device=self._feed.placement.to_device)
        feed = self._feed.redistribute(placement, Workers(job))
        if feed is self._feed:
            self._steps.redistribute(again)
        else:
            position = self._steps.position(again)
            self._steps.close()
            self._steps = feed.steps()
            self._steps.set_state(position)
            self._feed = self._dataset._feed = feed
        self._restart(self._progress.steps - again)

    def _restart(self, steps: int) -> None:
        rows = [0] * len(self._feed.placement.local)
        self._progress.rows, self._progress.steps, self._progress.first_rows = rows, steps, ()

    def close(self) -> None:
        """Ends the pass; the next element is a StopIteration. Without effect on a pass that ended.

        A loop that is left before the end needs no call: the pass ends with its iterator.
        """
        self._steps.close()


class DistributedDataset:
    """An iterable whose elements hold one part for each replica, on that replica's device.

    Made by `experimental_distribute_dataset` and `distribute_datasets_from_function`. It can be
    iterated as often as the dataset it was made from. It has no `len`; see `cardinality`.
    """

    def __init__(self, feed: Feed):
        self._feed = feed
        self._latest = _Progress([0] * len(feed.placement.local))
        self._spec: Any = None

    def __iter__(self) -> DistributedIterator:
        iterator = DistributedIterator(self, self._feed)
        self._latest = iterator._progress
        return iterator

    def follow(self, mesh: Mesh, job: Job) -> None:
        """Deals what follows to the processes that there are now, also of passes that have begun.

        Where some have begun a step that others have not: so none is asked.

        Raises:
            GroupChangedError: workers have data of their own, and a lost one's is out of reach.
        """
        feed = self._feed
        if not feed.follows:
            raise GroupChangedError(
                "Expected datasets whose global batches every worker can read, to go on after a "
                f"change of the workers. Got policy {feed.policy.name}, {feed.how}: what a lost "
                "worker had not read is out of reach. Use experimental_distribute_dataset with "
                "policy DATA; or restart from a backup, which the launcher does without "
                "--min-workers."
            )
        feed.redistribute(Placement(mesh, to_device=feed.placement.to_device), Workers(job))

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
        """What this worker was given so far, in the latest pass."""
        return (_describe(self._feed, self._latest),)


def _describe(feed: Feed, progress: _Progress) -> WorkerInput:
    return WorkerInput(
        worker=feed.workers.index,
        policy=feed.policy,
        how=feed.how,
        steps=progress.steps,
        rows=sum(progress.rows),
        rows_per_replica=tuple(progress.rows),
        first_rows=progress.first_rows,
    )


def log_first_step(feed: Feed, rows: Sequence[int]) -> None:
    """Says once what a dataset's first batch became: rows of each replica, grouped by worker."""
    workers, replicas = feed.workers.count, feed.placement.num_replicas
    each = replicas // workers
    shares = ["+".join(map(str, rows[w * each : (w + 1) * each])) for w in range(workers)]
    logger.info(
        "Input: policy %s, %s; %d worker%s, %d replica%s; first batch of %d rows dealt as %s.",
        feed.policy.name,
        feed.how,
        workers,
        "" if workers == 1 else "s",
        replicas,
        "" if replicas == 1 else "s",
        sum(rows),
        " | ".join(shares),
    )
