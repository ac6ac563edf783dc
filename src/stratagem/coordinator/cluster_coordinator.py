"""ClusterCoordinator: hands functions to whichever worker is free. TF's interface."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from stratagem.coordinator import remote_value
from stratagem.coordinator.consistency import rule
from stratagem.coordinator.dispatcher import Dispatcher
from stratagem.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator
from stratagem.coordinator.per_worker_values import open_values
from stratagem.coordinator.plans import Call, Plan, Plans
from stratagem.coordinator.remote_value import RemoteValue
from stratagem.coordinator.scheduled import Scheduled
from stratagem.coordinator.terms import AHEAD_SECONDS, Terms
from stratagem.data.dealt import DealtDataset, DealtIterator
from stratagem.data.owned import owned_array
from stratagem.strategies.parameter_server import (
    HYBRID,
    ParameterServerStrategy,
)

_OPEN_SECONDS = 300.0
_lock = threading.Lock()


class ClusterCoordinator:
    """Schedules functions on the workers of a ParameterServerStrategy. Coordinator only.

    One object a strategy: making it again gives the same one.

    Args:
        strategy: of the cluster.

    Raises:
        ValueError: another strategy.
    """

    strategy: ParameterServerStrategy

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                f"Expected a ParameterServerStrategy to coordinate. Got {strategy!r}. Other "
                "strategies run steps themselves: call strategy.run."
            )
        with _lock:
            if strategy.coordinator is None:
                strategy.coordinator = self = super().__new__(cls)
                self._begin(strategy)
            return strategy.coordinator

    def _begin(self, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self._dealt: Any = weakref.WeakKeyDictionary()  # iterators whose batches are noted
        self._passes = itertools.count()
        self._workers = len(strategy.workers)  # that there ever were
        self._plans = Plans(strategy)
        self._iterators = itertools.count(1)
        setup = {
            "servers": [list(s) for s in strategy.servers],
            "job": strategy.job_id,
            "coordinator": strategy.link.servers.client,
        }
        self.dispatcher = Dispatcher(
            strategy.link, strategy.workers, _terms(strategy), setup, self._staged,
            strategy.told, strategy.record,
        )  # fmt: skip

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Any = None
    ) -> RemoteValue:
        """Has some worker call `fn(*args, **kwargs)`; returns at once.

        `fn` is traced here, once for each set of shapes; its Python code does not run on workers.
        A worker that is lost in the middle of it is no error: another one runs it, and what it
        writes is applied once.

        Args:
            fn: Python over tensors, variables, `next(iterator)`, `strategy.run`.
            args: tensors; iterators of datasets; PerWorkerValues; other objects are constants.
                NumPy arrays are copied now, so that the program may change them at once. A JAX
                array never changes, and is not: pass one where many closures share much.
            kwargs: likewise.

        Returns:
            The result to come. If the data of an iterator in `args` have ended, `is_ok()` of it is
            False.

        Raises:
            ValueError: a RemoteValue among the arguments.
            TypeError: arrays of text or objects among them.
            Exception: what an earlier closure raised, once.
        """
        fn, arguments = _checked(fn, args, kwargs)
        try:
            (args, kwargs), batch = self._take(arguments)
        except StopIteration:
            value = RemoteValue()
            value.end()
            return value
        with self.strategy.scope():
            call = self._plans.find(fn, args, kwargs)
        return self.submit(call, batch=batch)

    def _take(self, arguments: Any) -> tuple[Any, tuple[str, int] | None]:
        """The arguments as they are now, with a batch in the place of each dealt iterator, and
        which one it is.

        In a job that goes on, batches that are finished are left out.

        Raises:
            StopIteration: an iterator is at its end.
        """
        leaves, tree = jax.tree.flatten(arguments)
        if not leaves:
            return arguments, None
        if any(isinstance(x, PerWorkerIterator) and x.element_spec is None for x in leaves):
            raise StopIteration  # no worker has any element
        dealt = [leaf for leaf in leaves if isinstance(leaf, DealtIterator)]
        batch = None
        if len(dealt) == 1 and self.strategy.record is not None:
            known = self._dealt.get(dealt[0])
            if known is None:
                key = f"dealt {next(self._passes)}"
                known = key, itertools.count(), self.dispatcher.begin_data(key)
                self._dealt[dealt[0]] = known
            key, numbers, finished = known
            while (number := next(numbers)) in finished:
                dealt[0].take()
            batch = key, number
        taken = [
            leaf.take() if isinstance(leaf, DealtIterator) else owned_array(leaf) for leaf in leaves
        ]
        return jax.tree.unflatten(tree, taken), batch

    def submit(
        self, call: Call, *, counts: bool = True, rows: int | None = None, most: int | None = None,
        batch: tuple[str, int] | None = None, at: list[int] | None = None,
        share: float | None = None, parts: int = 0,
    ) -> RemoteValue:  # fmt: skip
        """Schedules what was planned before; see `Scheduled` and `Dispatcher.schedule`."""
        value = RemoteValue()
        closure = Scheduled(*call, value, counts, rows, batch, at, share, parts)
        self.dispatcher.schedule(closure, most)
        return value

    def join(self) -> None:
        """Waits until all that was scheduled is done.

        Raises:
            Exception: the first error of a closure since the last that was raised; the closures
                that were queued then are cancelled.
        """
        self.dispatcher.ask("join")

    def done(self) -> bool:
        """Whether all that was scheduled is done. Raises as `join`."""
        return self.dispatcher.ask("done")

    def fetch(self, val: Any) -> Any:
        """The results of the RemoteValues in a structure; waits for them."""
        return remote_value.fetch(val)

    @property
    def staleness(self) -> Any:
        """How late gradients came so far: `count`, `mean`, `max` and `histogram` of how many other
        updates were applied between the read and the write of a step."""
        return self.dispatcher.staleness

    @property
    def counts(self) -> Any:
        """How many closures finished, failed, ran again, were dropped."""
        return self.dispatcher.counts

    def add_worker(self, address: str) -> int:
        """Adds a worker while the job runs; it takes part as soon as it is there.

        Args:
            address: "host:port", where `stratagem serve` listens or will listen; or the `target`
                of a `Server`, which has the protocol in front.

        Returns:
            Its index, which is new.
        """
        address = address.rpartition("://")[2]
        with _lock:
            index, self._workers = self._workers, self._workers + 1
        self.dispatcher.add_worker(f"worker {index}", address)
        return index

    def remove_worker(self, index: int) -> None:
        """Lets a worker leave the job, when it has done what it has in hand. It is not stopped.

        Raises:
            ValueError: there never was such a worker.
        """
        if not 0 <= index < self._workers:
            raise ValueError(
                f"Expected the index of a worker, below {self._workers}. Got {index}. See "
                "strategy.workers, and what add_worker has returned."
            )
        self.dispatcher.remove_worker(f"worker {index}")

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """A dataset that each worker makes for itself, whole.

        Args:
            dataset_fn: makes an iterable of batches, on the worker; without arguments or with an
                InputContext. `experimental_get_current_worker_index()` in it tells workers apart.
                Or an iterable itself, which is sent to the workers. Or what
                `strategy.experimental_distribute_dataset` gives: then each batch goes to one
                closure, and the workers read nothing themselves.

        Returns:
            What `iter` makes an iterator of, for `schedule`.
        """
        if isinstance(dataset_fn, DealtDataset):
            return dataset_fn
        dataset_fn = getattr(dataset_fn, "python_function", dataset_fn)  # of a stratagem.function
        return PerWorkerDataset(dataset_fn, self.open_iterator)

    def open_iterator(self, pickled: bytes) -> PerWorkerIterator:
        """Has each worker read what these bytes make: a dataset function, or NumberedBatches."""
        number = next(self._iterators)
        element = self.dispatcher.open_iterator(number, pickled, _OPEN_SECONDS)
        iterator = PerWorkerIterator(number, element)
        weakref.finalize(iterator, self.dispatcher.let_go.append, number).atexit = False
        return iterator

    def _staged(self, plan: Plan) -> list[Any] | None:
        """The updates of a plan that wait for the end of a round; None where all do."""
        if self.strategy.consistency.mode != HYBRID:
            return None
        return [push.uid for push in plan.parts.pushes if push.table is None]


def _terms(strategy: ParameterServerStrategy) -> Terms:
    said = strategy.consistency
    consistency = rule(said.mode, said.max_staleness, said.backup_workers)
    seconds = strategy.snapshot_seconds if strategy.state_dir else math.inf
    return Terms(consistency=consistency, snapshot_seconds=seconds, ahead=AHEAD_SECONDS)


def _checked(fn: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[tuple[Any, ...], Any]]:
    fn = getattr(fn, "python_function", fn)  # of a stratagem.function
    if not callable(fn):
        raise TypeError(
            f"Expected a function to schedule. Got {type(fn).__name__}. Write "
            "coordinator.schedule(step, args=(iterator,)), not schedule(step(iterator))."
        )
    if args is not None and not isinstance(args, (list, tuple)):
        raise ValueError(
            f"Expected args as a list or tuple. Got {type(args).__name__}. Write args=(x,)."
        )
    arguments = open_values((tuple(args or ()), dict(kwargs or {})))
    if any(isinstance(leaf, RemoteValue) for leaf in jax.tree.leaves(arguments)):
        raise ValueError(
            "Expected tensors, iterators or Python objects as arguments of a scheduled function. "
            "Got a RemoteValue, whose result may not be there. Pass value.fetch(), or do both "
            "steps in one function."
        )
    return fn, arguments
