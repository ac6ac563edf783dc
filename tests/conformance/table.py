"""What a row of the parity table is, and the strategies that it runs over."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

import stratagem
from stratagem import PerReplica, config


def rehearsed_tpu(cores: int) -> stratagem.TPUStrategy:
    """A TPUStrategy on virtual devices, as STRATAGEM_REHEARSE=tpu:N would make it."""
    rehearsal = config._Rehearsal("tpu", cores)
    with mock.patch.object(config, "_rehearsal", rehearsal):
        return stratagem.TPUStrategy(stratagem.cluster_resolver.TPUClusterResolver("local"))


MAKERS = {
    "default": stratagem.get_strategy,
    "one": lambda: stratagem.OneDeviceStrategy("CPU:1"),
    "two": lambda: stratagem.MirroredStrategy(["CPU:0", "CPU:1"]),
    "three": lambda: stratagem.MirroredStrategy(["CPU:2", "CPU:0", "CPU:1"]),
    "tpu": lambda: rehearsed_tpu(2),
    "central": lambda: stratagem.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0"),
}
ALL = tuple(MAKERS)
SEVERAL = ("two", "three", "tpu", "central")  # more than one replica
COMPONENTS = SEVERAL[:-1]  # on-read variables have a component on each replica
REAL = ("one", "two", "three", "tpu", "central")  # not the default strategy


@functools.cache
def make(name: str) -> Any:
    """The strategy of that name; one object for the whole session, so that programs are shared."""
    return MAKERS[name]()


class Each:
    """An expected value for each replica; a bare one where there is a single replica."""

    def __init__(self, values: Sequence[Any]):
        self.values = list(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Each) and self.values == other.values

    __hash__ = None

    def __repr__(self) -> str:
        return "{" + " | ".join(map(repr, self.values)) + "}"


def each(replicas: int, fn: Callable[[int], Any]) -> Any:
    """`{fn(0) | fn(1) | ...}`, or `fn(0)` for one replica, as results come out of `run`."""
    return Each([fn(r) for r in range(replicas)]) if replicas > 1 else fn(0)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of section 6 of the reference, on any number of replicas.

    Attributes:
        number: of the row; a row of several cases stands here several times.
        name: what the row shows.
        call: does it.
        expected: the result for a number of replicas, or the class of an error.
        observed: what TensorFlow 2.21 gives on two replicas; must be `expected(2)` unless
            `differs` says why it is not.
        differs: why we differ on purpose.
        on: strategies where the row makes sense.
        match: pattern of the error's text.
        dtype: of the result.
    """

    number: int
    name: str
    call: Callable[[Any], Any]
    expected: Any
    observed: Any = None
    differs: str = ""
    on: tuple[str, ...] = ALL
    match: str = ""
    dtype: str | None = None

    @property
    def raises(self) -> bool:
        return isinstance(self.expected, type)


def plain(value: Any) -> Any:
    """A result as Python lists, with Each for what differs between replicas."""
    if isinstance(value, PerReplica):
        return Each([plain(part) for part in value.values])
    if isinstance(value, stratagem.Mirrored):
        return plain(value.value)
    if isinstance(value, keras.Variable):
        return value.numpy().tolist()
    if isinstance(value, stratagem.IndexedSlices):
        return [plain(value.indices), plain(value.values)]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def close(got: Any, expected: Any) -> bool:
    """Equality to float32 precision, through structures."""
    if isinstance(expected, Each):
        return isinstance(got, Each) and close(got.values, expected.values)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, list) or len(got) != len(expected):
            return False
        return all(close(g, e) for g, e in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[k], expected[k]) for k in got)
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return bool(np.isclose(got, expected, rtol=1e-6))
    return type(got) is type(expected) and got == expected


def parts(strategy: Any, values: Sequence[Any], dtype: Any = np.float32) -> Any:
    """`{values[0] | values[1] | ...}`, as many as the strategy has replicas."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: np.asarray(values[ctx.replica_id_in_sync_group], dtype)
    )


def replica_id() -> Any:
    return stratagem.get_replica_context().replica_id_in_sync_group


def rank(dtype: Any = np.float32) -> Any:
    """This replica's id plus one, as a tensor."""
    return keras.ops.cast(replica_id() + 1, np.dtype(dtype).name)


def context() -> Any:
    return stratagem.get_replica_context()


def variable(strategy: Any, aggregation: str, synchronization: str = "auto", value: Any = 10.0):
    with strategy.scope():
        return keras.Variable(
            np.asarray(value, np.float32),
            trainable=False,
            aggregation=aggregation,
            synchronization=synchronization,
        )


def components(strategy: Any, var: Any) -> Any:
    """Each replica's part of a variable, seen from outside."""
    values = [plain(v) for v in strategy.experimental_local_results(var)]
    return Each(values) if len(values) > 1 else values[0]
