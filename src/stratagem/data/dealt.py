"""A dataset whose batches a coordinator deals to closures: each batch once, whoever runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax

from stratagem.data.adapt import SelfDescribed
from stratagem.data.owned import owned


class DealtDataset:
    """What `ParameterServerStrategy.experimental_distribute_dataset` returns.

    Args:
        dataset: any iterable of batches; iterated anew for each pass.
    """

    def __init__(self, dataset: Iterable[Any]):
        if not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"Expected an iterable of batches to distribute. Got {type(dataset).__name__}. "
                "Pass a dataset, a list or an object with __iter__."
            )
        self._dataset = dataset

    def __iter__(self) -> DealtIterator:
        return DealtIterator(self.batches())

    def batches(self) -> Iterator[Any]:
        """The batches themselves, of one pass; for `fit`. Several wait until they are sent."""
        batches = iter(self._dataset)
        # Those of this package are new arrays, or parts of arrays that do not change.
        return batches if isinstance(self._dataset, SelfDescribed) else map(owned, batches)


class ClosureIterator(Iterator[Any]):
    """An iterator of scheduled functions, with what TensorFlow's has besides `next`."""

    def get_next(self) -> Any:
        """`next`."""
        return next(self)

    def get_next_as_optional(self) -> NoReturn:
        """Not available."""
        raise NotImplementedError(
            "Expected next(iterator) or get_next() in a scheduled function. Got "
            "get_next_as_optional(): whether there is a further element is not known while the "
            "function is traced. Call next(iterator), and ask is_ok() of what schedule returns, "
            "which is False where the data have ended."
        )


class DealtIterator(ClosureIterator):
    """One pass over a DealtDataset: an argument of `schedule`, which takes a batch a call."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches

    def __next__(self) -> Any:
        raise ValueError(
            "Expected next(iterator) inside a function that is scheduled. Got it outside. Pass the "
            "iterator as an argument of coordinator.schedule, and call next in the function."
        )

    def take(self) -> Element:
        """The next batch, for one closure. Called by the coordinator.

        Raises:
            StopIteration: the pass is over.
        """
        return Element(next(self._batches))


@jax.tree_util.register_pytree_with_keys_class
class Element(ClosureIterator):
    """The batch of one closure; in the function that is traced it is the iterator."""

    def __init__(self, batch: Any):
        self.batch = batch
        self._taken = False

    def __next__(self) -> Any:
        if self._taken:
            raise ValueError(
                "Expected one next(iterator) in a scheduled function. Got a second one: each "
                "closure is dealt one batch. Make larger batches, or schedule more closures."
            )
        self._taken = True
        return self.batch

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], None]:
        """For JAX: the batch is what goes along."""
        return ((jax.tree_util.GetAttrKey("batch"), self.batch),), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any, ...]) -> Element:
        """For JAX."""
        return cls(*children)
