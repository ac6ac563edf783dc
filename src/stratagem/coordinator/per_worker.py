"""Datasets that each worker has its own of, and reads itself."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import cloudpickle
import jax
import numpy as np

from stratagem import context
from stratagem.coordinator.dataset_functions import dataset_of, pickled
from stratagem.data.batch import Element, read_element
from stratagem.data.dealt import ClosureIterator
from stratagem.data.numbered import NumberedBatches
from stratagem.step import primitives
from stratagem.values import as_array

_reading: contextvars.ContextVar[Reading | None] = contextvars.ContextVar(
    "stratagem_elements", default=None
)
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object that has no text of its own
_worker_index: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "stratagem_worker_index", default=None
)


@dataclasses.dataclass
class Reading:
    """The elements that a function takes while it is traced, by its `Place` and turn.

    Attributes:
        specs: what they look like, where that is known better than by the iterator's own spec.
        taken: how many elements of each iterator were taken.
        seen: what each of them looked like.
    """

    specs: dict[tuple[int, int], Any]
    taken: dict[int, int] = dataclasses.field(default_factory=dict)
    seen: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)


class PerWorkerDataset:
    """What `create_per_worker_dataset` returns; `iter` of it goes to `schedule` as an argument.

    Each worker makes the dataset for itself, and reads it from its beginning.
    """

    def __init__(self, dataset_fn: Callable[..., Any], open_iterator: Callable[[bytes], Any]):
        self._pickled = pickled(dataset_fn)
        self._open = open_iterator

    def __iter__(self) -> PerWorkerIterator:
        return self._open(self._pickled)

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the elements; a worker is asked for them."""
        return iter(self).element_spec


class PerWorkerIterator(ClosureIterator):
    """An iterator that each worker has one of. `next` of it works in a scheduled function.

    The workers forget it when the program has let go of it, and no closure needs it any more.

    Args:
        number: unique in the job.
        element: a structure of ShapeDtypeStructs: the first element of some worker; None where
            there is none.
    """

    def __init__(self, number: int, element: Any):
        self.number = number
        self.element_spec = element
        self._places: dict[int, Place] = {}

    def __next__(self) -> Any:
        raise NotImplementedError(
            "Expected next(iterator) inside a function that is scheduled, of an iterator that is "
            "an argument of it: the elements are on the workers. Got it outside, or of an iterator "
            "that the function knows by itself. Pass the iterator as an argument of "
            "coordinator.schedule, and call next in the function."
        )

    def at(self, position: int) -> Place:
        """What stands for it while a function is traced, which takes it as iterator `position`."""
        if position not in self._places:
            self._places[position] = Place(position, self.element_spec)
        return self._places[position]


class Place(ClosureIterator):
    """An iterator in a function that is traced: which one of those that it takes.

    Equal for all iterators with such elements, so that one program serves them.

    Args:
        position: among the iterators of the call.
        element: as of PerWorkerIterator.
    """

    def __init__(self, position: int, element: Any):
        self._position = position
        self.element_spec = element
        leaves, tree = jax.tree.flatten(element)
        self._key = position, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __iter__(self) -> NoReturn:
        raise NotImplementedError(
            "Expected next(iterator) in a scheduled function. Got a loop over the iterator (for, "
            "list, zip or iter), which would have no end: the function is traced, and takes as "
            "many elements as it calls next. Take one with next(iterator), and schedule a closure "
            "for each."
        )

    def __next__(self) -> Any:
        reading = _reading.get()
        if context.current().trace is None or reading is None:
            raise NotImplementedError(
                "Expected next(iterator) in the function that was scheduled with it. Got it later, "
                "of an iterator that was kept from there. Return what next gives."
            )
        turn = reading.taken.get(self._position, 0)
        reading.taken[self._position] = turn + 1
        spec = reading.specs.get((self._position, turn), self.element_spec)
        reading.seen[self._position, turn] = spec
        leaves, tree = jax.tree.flatten(spec)
        values = [
            primitives.given("element", (self._position, turn, i), leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, values)


@contextlib.contextmanager
def read_by(reading: Reading) -> Iterator[None]:
    """In the body a function is traced, which may take elements."""
    reading.taken.clear()
    reading.seen.clear()
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


def experimental_get_current_worker_index() -> Any:
    """The index of the worker: in a scheduled function a tensor, in a dataset function an int.

    Raises:
        RuntimeError: elsewhere.
    """
    if (index := _worker_index.get()) is not None:
        return index
    if context.current().trace is not None and _reading.get() is not None:
        return primitives.given("worker", (), (), np.dtype("int32"))
    raise RuntimeError(
        "Expected a call in a function that coordinator.schedule traces, or in a dataset function "
        "on a worker. Got it elsewhere, where there is no current worker."
    )


class Elements:
    """A worker's own end of a per-worker iterator.

    Args:
        pickled: the dataset function.
        index: the worker's.
    """

    def __init__(self, pickled: bytes, index: int):
        self._make = cloudpickle.loads(pickled)
        self._index = index
        self._iterator: Iterator[Any] | None = None
        self._back: list[Element] = []
        self._count = 0  # elements of the dataset that were read

    def take(self, at: Sequence[int] | None = None) -> Element:
        """The next element.

        Args:
            at: which one, of `data.numbered.NumberedBatches`; they have no next one.

        Raises:
            StopIteration: there is none.
            TypeError: the dataset function gives no dataset, or the element is none of arrays.
        """
        if at is not None:
            leaves, tree = jax.tree.flatten(self._make.read(*at))
            return Element([as_array(leaf) for leaf in leaves], tree)
        if self._back:
            return self._back.pop(0)
        token = _worker_index.set(self._index)
        try:
            if self._iterator is None:
                self._iterator = iter(dataset_of(self._make))
            leaves, tree = read_element(next(self._iterator), self._count)
        finally:
            _worker_index.reset(token)
        self._count += 1
        # They are kept while others are taken, and the dataset may refill its buffers.
        return Element([as_array(leaf, kept=True) for leaf in leaves], tree)

    def put_back(self, elements: Sequence[Element]) -> None:
        """What was taken in vain comes next again."""
        if not isinstance(self._make, NumberedBatches):
            self._back[:0] = elements

    def spec(self) -> Any:
        """Shapes and dtypes of the next element, as a structure."""
        first = (0, 0, 0, 1 << 62)
        element = self.take(first if isinstance(self._make, NumberedBatches) else None)
        self.put_back([element])
        return spec_of(element)


class Taken:
    """The elements that one closure takes on a worker.

    Args:
        iterators: of the worker, by number.
        numbers: of the closure's own, by position.

    Attributes:
        elements: by position of their iterator and turn.
    """

    def __init__(self, iterators: Mapping[int, Elements], numbers: Sequence[int]):
        self._iterators, self._numbers = iterators, numbers
        self._sources: dict[int, Elements] = {}  # that it may put back, even when they are gone
        self.elements: dict[tuple[int, int], Element] = {}

    def take(self, position: int, turn: int, at: Sequence[int] | None) -> None:
        """Takes the next element of an iterator; `at` as of `Elements.take`.

        Raises:
            Ended: there is none.
        """
        number = self._numbers[position]
        source = self._sources.setdefault(position, self._iterators[number])
        try:
            self.elements[position, turn] = source.take(at)
        except StopIteration:
            raise Ended(number) from None

    def specs(self) -> dict[tuple[int, int], Any]:
        """Shapes and dtypes of each element, as a structure."""
        return {key: spec_of(element) for key, element in self.elements.items()}

    def put_back(self) -> None:
        """They come next again."""
        for position, source in self._sources.items():
            mine = [key for key in sorted(self.elements) if key[0] == position]
            source.put_back([self.elements.pop(key) for key in mine])


class Ended(Exception):
    """A per-worker iterator has no further element on this worker."""

    def __init__(self, iterator: int):
        super().__init__(iterator)
        self.iterator = iterator


def spec_of(element: Element) -> Any:
    """Shapes and dtypes of an element, as a structure."""
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in element.leaves]
    return jax.tree.unflatten(element.treedef, specs)


def variant_key(elements: Mapping[tuple[int, int], Element]) -> str:
    """Names structure and shapes of the elements of a closure.

    The same for specs and for arrays, and in all processes.
    """
    return ";".join(
        f"{position}.{turn}:{_ADDRESS.sub('', str(tree))}:"
        + ",".join(f"{np.dtype(x.dtype)}{tuple(x.shape)}" for x in leaves)
        for (position, turn), (leaves, tree) in sorted(elements.items(), key=lambda item: item[0])
    )
