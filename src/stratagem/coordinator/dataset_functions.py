"""Functions that make a dataset on each worker: how they travel, and what they give there."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from stratagem.data import InputContext

_WANTED = (
    "dataset_fn: expected a function that returns an iterable of batches, such as a list, a "
    "generator or a dataset."
)


def pickled(dataset: Any) -> bytes:
    """A dataset function, or a dataset that each worker reads, as bytes.

    Raises:
        TypeError: it holds what cannot be sent; names that where it is found.
    """
    make = dataset if callable(dataset) else lambda: dataset
    try:
        return bytes(cloudpickle.dumps(make))
    except Exception as error:  # an object may raise anything
        needs = "".join(f", which needs {name}" for name in list(_held_back(dataset, []))[:1])
        raise TypeError(
            "dataset_fn: expected a function or a dataset that can be sent to the workers. Got "
            f"{_name(dataset)}{needs}: {error}. It runs on the workers, where there is nothing of "
            "this program: capture variable.numpy() instead of a variable, and open files, "
            "generators and connections in the function."
        ) from error


def dataset_of(make: Any) -> Iterable[Any]:
    """What a user's dataset function gives; some take an InputContext.

    Raises:
        TypeError: no iterable of batches.
    """
    takes = [
        p
        for p in inspect.signature(make).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    made = make(InputContext(1, 0, 1)) if takes else make()
    # `strategy.distribute_datasets_from_function(fn)` in it gives the function.
    if callable(made) and not hasattr(made, "__iter__"):
        return dataset_of(made)
    if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Iterable):
        raise TypeError(
            f"{_WANTED} Got {type(made).__name__} from {_name(make)}. Return the dataset, or yield "
            "the batches; put one batch alone in a list."
        )
    return made


def _held_back(fn: Any, known: list[Any]) -> Iterator[str]:
    """What a function captures that cannot be pickled, also by functions that it calls."""
    if not isinstance(fn, types.FunctionType) or any(fn is one for one in known):
        return
    known.append(fn)
    try:
        found = inspect.getclosurevars(fn)
    except ValueError:  # it captures a name that has no value yet
        return
    for name, value in {**found.globals, **found.nonlocals}.items():
        if not _is_sendable(value):
            path = getattr(value, "path", None)
            what = type(value).__name__ + (f" {path!r}" if isinstance(path, str) else "")
            yield from (*_held_back(value, known), f"{name!r} ({what})")


def _is_sendable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # as above
        return False
    return True


def _name(dataset: Any) -> str:
    if not callable(dataset):
        return f"a {type(dataset).__name__}"
    return str(getattr(dataset, "__qualname__", type(dataset).__name__))
