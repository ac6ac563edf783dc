"""Data of `fit` and `evaluate` that the workers read themselves, under ParameterServerStrategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.coordinator import ClusterCoordinator
from stratagem.coordinator.remote_value import RemoteValue
from stratagem.data import InputContext, InputOptions, RowBatches
from stratagem.data.policy import check_input_options
from stratagem.keras_bridge.adapters import OwnBatches


class DatasetCreator:
    """A function that makes a dataset, for `fit`: where the model trains on workers, each of them
    calls it and reads its own dataset. (Elsewhere: `strategy.distribute_datasets_from_function`.)

    Without `steps_per_epoch` an epoch is all of it: it ends when the datasets of all workers have
    ended. Each worker reads what the function gives there, so that it should tell workers apart
    (`stratagem.coordinator.experimental_get_current_worker_index()`), or shuffle. A worker that is
    lost reads its dataset from the beginning when it comes back.

    Args:
        dataset_fn: takes an InputContext; returns an iterable of batches, such as
            `((x, y), (x, y), ...)`.
        input_options: as of `distribute_datasets_from_function`.

    Raises:
        TypeError: an argument is another thing.
    """

    def __init__(self, dataset_fn: Callable[[Any], Any], input_options: InputOptions | None = None):
        if not callable(dataset_fn):
            raise TypeError(
                f"dataset_fn: expected a function of an InputContext. Got "
                f"{type(dataset_fn).__name__}. Write DatasetCreator(lambda context: dataset)."
            )
        if input_options is not None and not isinstance(input_options, InputOptions):
            raise TypeError(
                f"input_options: expected InputOptions or None. Got {type(input_options).__name__}."
            )
        if input_options is not None:
            check_input_options(input_options, from_function=True)
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, context: InputContext) -> Any:
        """The dataset."""
        return self.dataset_fn(context)


class OnWorkers:
    """One tensor of a batch that a worker will read: its shape and dtype, as Keras asks for them.

    Args:
        batches: whose batch, or which.
        spec: of the first batch.
    """

    def __init__(self, batches: WorkerBatches | Numbered, spec: jax.ShapeDtypeStruct):
        self.batches = batches
        self.shape, self.dtype = tuple(spec.shape), np.dtype(spec.dtype)
        self.ndim = len(self.shape)


class WorkerBatches(Iterator[Any]):
    """One pass over the datasets of all workers, a stand-in for each batch.

    Args:
        dataset: of `ClusterCoordinator.create_per_worker_dataset`.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._last: list[RemoteValue] = []

    @functools.cached_property
    def iterator(self) -> Any:
        """That of the workers; opened at the first batch, as Keras makes passes that it drops."""
        return iter(self._dataset)

    def __next__(self) -> Any:
        if self.iterator.element_spec is None or any(value.ended for value in self._last):
            raise StopIteration
        return jax.tree.map(lambda spec: OnWorkers(self, spec), self.iterator.element_spec)

    def scheduled(self, value: RemoteValue) -> None:
        """Notes a step, which may find that the data have ended."""
        self._last = [v for v in self._last if v.ended or not v.done()] + [value]


class Numbered:
    """One batch that some worker reads by its number.

    Args:
        iterator: of the workers.
        number: of the pass.
        step: which batch of it.
        rows: how many it has.
    """

    def __init__(self, iterator: Any, number: int, step: int, rows: int):
        self.iterator, self.rows = iterator, rows
        self._place = [number, step]

    def at(self, cut: slice) -> list[int]:
        """Where some of its rows are."""
        return [*self._place, cut.start, cut.stop]


class NumberedPass(Iterator[Any]):
    """One pass over numbered batches: a stand-in for each. It can begin anywhere, for backups.

    Args:
        batches: as the program made them.
        iterator: of the workers.
    """

    def __init__(self, batches: RowBatches, iterator: Any):
        self._batches, self._iterator = batches, iterator
        self.set_state({"pass": batches.passes, "step": 0})

    def __next__(self) -> Any:
        if self._step >= len(self._batches):
            raise StopIteration
        start = self._step * self._batches.batch_size
        rows = min(self._batches.batch_size, self._batches.rows - start)
        batch = Numbered(self._iterator, self._number, self._step, rows)
        self._step += 1

        def stand_in(spec: Any) -> OnWorkers:
            return OnWorkers(batch, jax.ShapeDtypeStruct((rows, *spec.shape[1:]), spec.dtype))

        return jax.tree.map(stand_in, self._iterator.element_spec)

    def get_state(self) -> dict[str, int]:
        """As of `RowBatches`."""
        return {"pass": self._number, "step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """As of `RowBatches`."""
        self._number, self._step = state["pass"], state["step"]
        self._batches.passes = self._number + 1


class CreatorAdapter(OwnBatches):
    """Gives Keras stand-ins for the batches of a DatasetCreator.

    Args:
        creator: of the user.
        strategy: served.
    """

    num_batches = None

    def __init__(self, creator: DatasetCreator, strategy: Any):
        fn = creator.dataset_fn
        self._dataset = ClusterCoordinator(strategy).create_per_worker_dataset(fn)

    def get_jax_iterator(self) -> Iterator[Any]:
        """One pass."""
        return WorkerBatches(self._dataset)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """None: the data are on the workers."""
        raise NotImplementedError(
            "Expected a DatasetCreator in fit or evaluate, whose steps workers run. Got one where "
            "the batches themselves are needed. Pass arrays or a dataset."
        )


def batches_of(batch: Any) -> WorkerBatches | Numbered | None:
    """Where a batch comes from that a worker reads; None for one that is here."""
    first: Sequence[Any] = jax.tree.leaves(batch)[:1]
    return first[0].batches if first and isinstance(first[0], OnWorkers) else None
