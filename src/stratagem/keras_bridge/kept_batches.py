"""Batches that Keras keeps while it draws further ones, from data that may refill its buffers.

Keras draws the first two batches of a generator before it gives out any, and looks one ahead where
JAX's backend is no CPU; under parameter servers batches wait for a worker. There, what a user's
object gives is copied as it comes. Parts of arrays do not change while `fit` runs, and what tf.data
and Grain give is new each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from stratagem import _keras, context
from stratagem.data.owned import owned
from stratagem.keras_bridge.hooks import wrap


def install() -> None:
    """Attaches the bridge to the adapters of what users write themselves."""
    wrap(_keras.GeneratorDataAdapter, "__init__", _from_generator)
    for adapter in (_keras.PyDatasetAdapter, _keras.TorchDataLoaderAdapter):
        wrap(adapter, "get_jax_iterator", _batches)


def _from_generator(original: Any, self: Any, generator: Iterator[Any]) -> None:
    original(self, _each_owned(generator) if context.has_strategy() else generator)


def _batches(original: Any, self: Any) -> Iterator[Any]:
    ahead = jax.default_backend() != "cpu" and context.has_strategy()
    kept = ahead or context.get_strategy().served
    return _each_owned(original(self)) if kept else original(self)


def _each_owned(batches: Iterator[Any]) -> Iterator[Any]:
    return (owned(batch) for batch in batches)
