"""JAX computes with 32 bits: integers that those do not hold are an error, wherever they enter."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

import stratagem
from stratagem.strategies.sharded import ShardedVariable
from stratagem.values import IndexedSlices, as_array

WIDE = np.array([2**40])
STRATEGIES = {
    "default": stratagem.get_strategy,
    "one": lambda: stratagem.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: stratagem.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: stratagem.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def refused(kind="int"):
    return pytest.raises(ValueError, match=f"Expected integers that {kind}32 holds.* Got {kind}64")


def test_arguments_and_results(strategy):
    with refused():
        strategy.run(lambda x: x, (WIDE,))
    with refused():
        strategy.run(lambda: WIDE)
    with refused("uint"):
        strategy.run(lambda: [np.uint64(2**63)])
    assert strategy.run(lambda: {"wide": 2**40})["wide"] == 2**40  # no tensor
    parts = strategy.run(lambda x: (x, np.array([7, 8])), (np.array([2**31 - 1, -(2**31)]),))
    for part in strategy.experimental_local_results(parts):
        assert [p.tolist() for p in part] == [[2**31 - 1, -(2**31)], [7, 8]]
        assert {p.dtype for p in part} == {np.dtype("int32")}


def test_parts_of_arguments(strategy):
    parts = [WIDE] * strategy.num_replicas_in_sync
    with refused():
        strategy.run(lambda x: x, (stratagem.PerReplica(parts),))
    if strategy is stratagem.get_strategy():
        return  # it gives a value back as it is
    with refused():
        strategy.reduce("SUM", stratagem.PerReplica(parts), axis=None)


def scope_of(strategy):
    default = strategy is stratagem.get_strategy()
    return contextlib.nullcontext() if default else strategy.scope()


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_variables(strategy):
    with scope_of(strategy):
        for dtype in ("int64", "int32", None):
            with refused_any():
                keras.Variable(WIDE, dtype=dtype, trainable=False)
        number = keras.Variable(np.array([1]), dtype="int64", trainable=False)
        real = keras.Variable(np.array([1.0]))
    for write in (number.assign, number.assign_add, number.assign_sub):
        with refused_any():
            write(WIDE)
        with refused_any():
            strategy.run(lambda write=write: write(WIDE))
    assert number.numpy().tolist() == [1]
    number.assign(np.array([5]))
    number.assign_add(np.int64(2))
    assert number.numpy().tolist() == [7]
    real.assign(WIDE)
    assert real.numpy() == 2.0**40


def refused_any():
    return pytest.raises(ValueError, match="Expected integers that int32 holds")


def test_what_fits_another_type():
    unsigned = keras.Variable(np.zeros(1), dtype="uint32", trainable=False)
    unsigned.assign(np.array([2**32 - 1]))
    assert unsigned.numpy().tolist() == [2**32 - 1]
    with pytest.raises(ValueError, match="uint32 holds.* Got int64 from -1 to -1"):
        unsigned.assign(np.array([-1]))
    assert as_array(np.zeros(0, np.int64)).dtype == np.int32


class Held(ShardedVariable):
    """Two rows, each a shard."""

    name, shape, dtype, shard_ranges = "held", (2,), "int64", [(0, 1), (1, 2)]

    def assign_rows(self, start, rows):
        raise AssertionError((start, rows))

    def scatter(self, *changes):
        raise AssertionError(changes)


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.variables[0].assign(WIDE),
        lambda v: v.variables[0].assign_add([2**40]),
        lambda v: v.scatter_update(IndexedSlices(WIDE, [0])),
    ],
)
def test_rows_of_shards(write):
    with refused():
        write(Held())
