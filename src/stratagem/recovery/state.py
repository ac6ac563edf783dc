"""Variables as arrays that do not depend on where they lived, and back.

A mirrored value is stored once. A variable that synchronises on read is stored as its components,
so that it comes back exactly on as many replicas, and as their aggregate on another number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import variables
from stratagem.errors import BackupMismatchError
from stratagem.values import unstack

# Where what is stored is what each replica of a process that joins begins with (`mine`).
_OWN = "own"

# The number that Keras adds to the name of the second layer (optimizer, metric) of a kind.
_COUNTER = re.compile(r"_\d+(?=[/_]|$)")


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is stored beside a variable's array.

    Attributes:
        path: Keras' path of the variable.
        shape: of its value.
        dtype: of its value.
        components: how stored components combine ("sum", "mean", "only_first_replica", "none");
            None when the array is the value; "own" when it is what every component of a process
            that joins begins with.
    """

    path: str
    shape: list[int]
    dtype: str
    components: str | None = None

    def __str__(self) -> str:
        return f"{self.path} {tuple(self.shape)} {self.dtype}"

    def fits(self, other: Entry) -> bool:
        """True for the same variable of the same program, made in whatever order."""
        mine, theirs = (_COUNTER.sub("", e.path) for e in (self, other))
        return (mine, self.shape, self.dtype) == (theirs, other.shape, other.dtype)


def collect(**objects: Any) -> dict[str, list[Any]]:
    """The variables of each named object, each variable once, at its first place.

    Args:
        objects: models, layers, optimizers, metrics, variables, anything with `variables`, and
            lists, tuples and dicts of them. None has none.

    Raises:
        TypeError: names every object that has no variables to save.
    """
    seen: set[int] = set()
    found, wrong = {}, []
    for name, thing in objects.items():
        try:
            found[name] = [v for v in _variables(thing) if not _met(v, seen)]
        except TypeError as e:
            wrong.append(f"  {name}: {e}")
    if wrong:
        raise TypeError(
            "Expected Keras models, layers, optimizers, metrics or variables, or lists and dicts "
            "of them. Got\n" + "\n".join(wrong) + "\nPut plain Python values in the state dict."
        )
    return found


def build_optimizers(**objects: Any) -> None:
    """Creates the variables of optimizers that have none yet, where their model is known.

    It is a compiled model's own, or the only model among the objects.
    """
    models = [m for m in objects.values() if isinstance(m, keras.Model) and m.built]
    compiled = [m for m in models if getattr(m, "optimizer", None) is not None]
    pairs = [(m.optimizer, m) for m in compiled]
    for thing in objects.values():
        if isinstance(thing, keras.optimizers.Optimizer) and len(models) == 1:
            pairs.append((thing, models[0]))
    for optimizer, model in pairs:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)


def _met(variable: Any, seen: set[int]) -> bool:
    known = id(variable) in seen
    seen.add(id(variable))
    return known


def _variables(thing: Any) -> Iterator[Any]:
    if isinstance(thing, keras.Variable):
        yield thing
    elif isinstance(thing, keras.random.SeedGenerator):
        yield thing.state
    elif isinstance(thing, Mapping):
        for key in sorted(thing):
            yield from _variables(thing[key])
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _variables(part)
    elif thing is not None:
        if not hasattr(thing, "variables"):
            raise TypeError(f"{type(thing).__name__}")
        yield from thing.variables
        # A model's optimizer and the metrics of compile() are not among its variables.
        if isinstance(thing, keras.Model):
            yield from thing.metrics_variables
            if getattr(thing, "optimizer", None) is not None:  # compiled
                yield from thing.optimizer.variables


def entries(groups: Mapping[str, Sequence[Any]], components: bool = True) -> dict[str, list[Entry]]:
    """What describes the variables of each group: all their components, or `mine`."""
    return {name: [_entry(v, components) for v in group] for name, group in groups.items()}


def _entry(variable: Any, with_components: bool) -> Entry:
    components = None
    if variables.held_components(variable) is not None:
        components = variables.read_aggregation(variable) if with_components else _OWN
    return Entry(variable.path, list(variable.shape), str(variable.dtype), components)


def key(group: str, index: int) -> str:
    """The name of a variable's array."""
    return f"{group}/{index}"


def snapshot(
    groups: Mapping[str, Sequence[Any]], value: Callable[[Any], Any] | None = None
) -> dict[str, np.ndarray]:
    """Copies of all values on the host. Every process calls it; it waits for running steps.

    Args:
        groups: variables by name.
        value: of a variable, where it is not in the variable.
    """
    value = value or _held
    return {
        key(name, i): _to_host(value(variable))
        for name, group in groups.items()
        for i, variable in enumerate(group)
    }


def mine(variable: Any) -> Any:
    """What a process that joins gets of a variable, without asking other processes.

    A component of a sum is each process's own: it begins with zero. Others begin with this one's.
    """
    held = variables.held_components(variable)
    if held is None:
        return variable._value
    component = unstack(held)[0]
    is_sum = variables.read_aggregation(variable) == "sum"
    return jnp.zeros_like(component) if is_sum else component


def _held(variable: Any) -> jax.Array:
    held = variables.held_components(variable)
    if held is None:
        return variable._value
    return variables.home_strategy(variable).whole(variable.components)


def _to_host(array: jax.Array) -> np.ndarray:
    """A copy: the array itself may be donated to the next step."""
    return np.array(array.addressable_data(0) if array.is_fully_replicated else array)


def check(
    stored: Mapping[str, Sequence[Entry]], groups: Mapping[str, Sequence[Any]], where: str
) -> None:
    """Refuses stored variables that are not those of the program.

    Raises:
        BackupMismatchError: lists every difference.
    """
    wanted = entries(groups)
    differences = []
    for name in [*wanted, *(n for n in stored if n not in wanted)]:
        pairs = zip_longest(wanted.get(name, ()), stored.get(name, ()))
        differences += [
            f"  {name}: expected {mine or 'nothing'}; stored {theirs or 'nothing'}"
            for mine, theirs in pairs
            if mine is None or theirs is None or not mine.fits(theirs)
        ]
    if differences:
        raise BackupMismatchError(
            f"Expected the variables of this program in {where}. Got {len(differences)} that "
            "differ:\n" + "\n".join(differences) + "\nGo on with the model and optimizer that it "
            "was made with, or name another directory to start anew."
        )


def apply(
    stored: Mapping[str, Sequence[Entry]],
    arrays: Mapping[str, np.ndarray],
    groups: Mapping[str, Sequence[Any]],
) -> None:
    """Gives variables their stored values, laid out by the strategy of each. Every process."""
    for name, group in groups.items():
        for i, (variable, entry) in enumerate(zip(group, stored[name], strict=True)):
            _assign(variable, entry, arrays[key(name, i)])


def _assign(variable: Any, entry: Entry, array: np.ndarray) -> None:
    if entry.components is None:
        variable.assign(array)
    elif entry.components == _OWN:
        strategy = variables.home_strategy(variable)
        stacked = np.broadcast_to(array, (strategy.num_replicas_in_sync, *array.shape))
        variable.components = strategy.place_stacked(stacked)
    elif variables.has_components(variable) and _replicas(variable) == len(array):
        variable.components = variables.home_strategy(variable).place_stacked(array)
    else:
        variable.assign(_aggregate(array, entry))


def _replicas(variable: Any) -> int:
    return variables.home_strategy(variable).num_replicas_in_sync


def _aggregate(components: np.ndarray, entry: Entry) -> np.ndarray:
    """What another number of replicas shares out anew."""
    if entry.components == "sum":
        return components.sum(axis=0, dtype=components.dtype)
    if entry.components == "mean":
        return components.mean(axis=0).astype(components.dtype)
    if entry.components == "only_first_replica":
        return components[0]
    raise BackupMismatchError(
        f"Expected {len(components)} replicas, on which {entry} was saved: it synchronises on read "
        "and has aggregation 'none', so its components cannot be shared by another number. Give "
        "it an aggregation, or restore on as many replicas."
    )
