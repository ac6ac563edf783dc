"""A `tf`-shaped name with names below it; what is not there says where to find it instead."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras

from stratagem.compat.hints import HINTS


class Namespace(types.ModuleType):
    """A module without a file, such as `tf.math`.

    Args:
        name: its full name below `tf`, such as "math".
        names: what it holds.
        elsewhere: asked for a name that it does not hold, each time, so that what is not there
            yet appears when it is; returns `MISSING` for what it does not know.
    """

    def __init__(
        self, name: str, names: Mapping[str, Any], elsewhere: Callable[[str], Any] | None = None
    ):
        super().__init__(f"stratagem.compat.tensorflow.{name}", f"What there is of `tf.{name}`.")
        self.__dict__.update(names)
        self._path = name
        self._elsewhere = elsewhere

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks modules for
            raise AttributeError(name)
        if self._elsewhere is not None and (found := self._elsewhere(name)) is not MISSING:
            return found
        refuse(f"{self._path}.{name}")

    def __dir__(self) -> list[str]:
        return sorted(name for name in self.__dict__ if not name.startswith("_"))


MISSING = object()


def first_of(*modules: Any) -> Callable[[str], Any]:
    """Looks a public name up in modules of the package, in order."""

    def look_up(name: str) -> Any:
        if name.startswith("_"):
            return MISSING
        for module in modules:
            if (found := getattr(module, name, MISSING)) is not MISSING:
                return found
        return MISSING

    return look_up


def refuse(name: str) -> NoReturn:
    """Raises the AttributeError for `tf.<name>`, which names the nearest way there is.

    Raises:
        AttributeError: always.
    """
    raise AttributeError(
        f"Expected a name of TensorFlow that Stratagem has. Got tf.{name}, which it has not. "
        f"{nearest(name)}"
    )


def nearest(name: str) -> str:
    """What to write instead of `tf.<name>`, as a sentence."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):  # the hint of the name itself, or of what holds it
        if (hint := HINTS.get(".".join(parts[:length]))) is not None:
            return hint
    last = parts[-1].removeprefix("reduce_")
    modules = ((keras.ops, "keras.ops"), (jnp, "jax.numpy"), (jax.nn, "jax.nn"))
    for module, path in modules:
        for candidate in (last, parts[-1]):
            if hasattr(module, candidate):
                return f"Use {path}.{candidate}."
    return "Look for it in keras.ops, jax.numpy, jax.lax or jax.nn."
