"""Replicas with different numbers of rows, or none: what run and the collectives make of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.errors import ReplicaDependentWriteError, UnevenShapesError


@pytest.fixture(scope="module")
def strategy():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def rows(*sizes, start=1):
    """Parts `[n, 2]` that count up: `rows(2, 0, 1)` is the rows 1 to 3 on three replicas."""
    parts, at = [], start
    for n in sizes:
        values = np.arange(at, at + n, dtype="float32")
        parts.append(np.stack([values, -values], axis=1))
        at += n
    return stratagem.PerReplica(parts)


def lists(value):
    return [np.asarray(v).tolist() for v in value.values]


def here():
    return stratagem.get_replica_context()


def test_each_replica_sees_its_rows(strategy):
    """Row 33 of the table of TF's behaviour: a replica without rows runs the step like others."""
    result = strategy.run(lambda x: (x * 2, jnp.sum(x[:, 0])), (rows(2, 2, 0),))
    assert lists(result[0]) == [[[2, -2], [4, -4]], [[6, -6], [8, -8]], []]
    assert [p.shape for p in result[0].values] == [(2, 2), (2, 2), (0, 2)]
    assert lists(result[1]) == [3, 7, 0]


def test_every_replica_has_another_number(strategy):
    result = strategy.run(lambda x: jnp.mean(x, axis=0), (rows(3, 1, 2),))
    assert lists(result) == [[2, -2], [4, -4], [5.5, -5.5]]


def test_two_arguments_and_shared_ones(strategy):
    def fn(x, y, scale, offset):
        return jnp.sum(x) * scale + jnp.sum(y) + offset

    labels = stratagem.PerReplica([np.ones(2, "int32"), np.ones(1, "int32"), np.ones(0, "int32")])
    result = strategy.run(fn, (rows(2, 1, 0), labels, np.float32(3)), {"offset": 10})
    assert lists(result) == [12, 11, 10]


def test_all_reduce(strategy):
    def fn(x):
        return here().all_reduce("SUM", jnp.sum(x[:, 0])), here().all_reduce("MEAN", x.sum(0))

    total, mean = strategy.run(fn, (rows(2, 1, 0),))
    assert lists(total) == [6, 6, 6]
    assert lists(mean) == [[2, -2]] * 3


def test_all_gather(strategy):
    gathered = strategy.run(lambda x: here().all_gather(x, 0), (rows(2, 1, 0),))
    assert lists(gathered) == [[[1, -1], [2, -2], [3, -3]]] * 3


def test_all_gather_along_another_axis(strategy):
    gathered = strategy.run(lambda x: here().all_gather(x.T, 1), (rows(2, 1, 0),))
    assert lists(gathered) == [[[1, 2, 3], [-1, -2, -3]]] * 3


def test_gradient_of_all_gather(strategy):
    """TF: the incoming gradients of all replicas are summed, each replica gets its own slice."""

    def fn(x):
        with stratagem.GradientTape() as tape:
            everyone = here().all_gather(x[:, 0], 0)
            weights = jnp.arange(1.0, 1 + everyone.shape[0])
            loss = jnp.sum(everyone * weights) * (1 + here().replica_id_in_sync_group)
        return tape.gradient(loss, x)[:, 0]

    # The replicas' losses weigh 1, 2 and 3: six times the weight of each row.
    assert lists(strategy.run(fn, (rows(2, 0, 2),))) == [[6, 12], [], [18, 24]]


def test_gradient_of_all_reduce(strategy):
    def fn(x):
        with stratagem.GradientTape() as tape:
            total = here().all_reduce("SUM", jnp.sum(x[:, 0] ** 2))
            loss = total * total
        return tape.gradient(loss, x)[:, 0]

    # total = 14 on each of 3 replicas: d/dx of the sum of their losses is 3 * 2 * 14 * 2x.
    assert lists(strategy.run(fn, (rows(2, 1, 0),))) == [[168, 336], [504], []]


def test_collectives_that_wait_for_each_other(strategy):
    """A standard deviation over all rows: the second sum needs the first."""

    def fn(x):
        values = x[:, 0]
        count = here().all_reduce("SUM", jnp.float32(values.shape[0]))
        mean = here().all_reduce("SUM", jnp.sum(values)) / count
        variance = here().all_reduce("SUM", jnp.sum((values - mean) ** 2)) / count
        return (values - mean) / jnp.sqrt(variance), here().all_gather(values - mean, 0)

    normal, centred = strategy.run(fn, (rows(3, 1, 0),))
    expected = (np.arange(1, 5) - 2.5) / np.std(np.arange(1, 5))
    np.testing.assert_allclose(np.concatenate(normal.values), expected, rtol=1e-6)
    assert lists(centred) == [[-1.5, -0.5, 0.5, 1.5]] * 3


def test_code_that_asks_python_for_the_size(strategy):
    def fn(x):
        if not x.shape[0]:
            return jnp.float32(-1), "rows", len(x)
        return jnp.float32(x.shape[0] * 10), "rows", len(x)

    value, word, length = strategy.run(fn, (rows(2, 1, 0),))
    assert lists(value) == [20, 10, -1]
    assert word == "rows"
    assert length.values == (2, 1, 0)


def test_constants_that_depend_on_the_size(strategy):
    """Long constants that differ in the middle, also inside jit and a loop, stay apart."""

    def fn(x):
        table = np.zeros(3000, "float32")
        table[1500] = x.shape[0]
        looped = jax.lax.fori_loop(0, 2, lambda _, c: c + jnp.asarray(table)[1500], 0.0)
        return jnp.asarray(table)[1500], jax.jit(lambda: jnp.asarray(table).sum())(), looped

    plain, jitted, looped = strategy.run(fn, (rows(2, 1, 0),))
    assert lists(plain) == lists(jitted) == [2, 1, 0]
    assert lists(looped) == [4, 2, 0]


def test_host_functions_that_depend_on_the_size(strategy):
    def fn(x):
        def add(a, rows=x.shape[0]):
            return np.float32(a + rows)

        return jax.pure_callback(add, jax.ShapeDtypeStruct((), "float32"), jnp.float32(1))

    assert lists(strategy.run(fn, (rows(2, 1, 0),))) == [3, 2, 1]


def test_a_dead_value_that_is_common_elsewhere(strategy):
    with strategy.scope():
        v = keras.Variable(2.0)

    def fn(x):
        doubled = v.value * 2
        return jnp.sum(x) + (doubled if x.shape[0] > 1 else v.value)

    assert lists(strategy.run(fn, (rows(2, 1, 0),))) == [4, 2, 2]


def test_random_numbers_inside_a_class(strategy):
    result = strategy.run(lambda x: jax.random.normal(jax.random.key(0), x.shape), (rows(2, 1, 1),))
    np.testing.assert_array_equal(result.values[1], result.values[2])
    assert result.values[0].shape == (2, 2)


def test_prints_inside(strategy, capfd):
    strategy.run(lambda x: jax.debug.print("rows of {}", jnp.sum(x[:, 0])), (rows(2, 1, 0),))
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.split("\n"))
    assert [line for line in printed if line] == ["rows of 0.0", "rows of 3.0", "rows of 3.0"]


def test_components_of_variables(strategy):
    with strategy.scope():
        seen = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)
        full = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)

    def fn(x):
        seen.assign_add(jnp.float32(x.shape[0]))
        if x.shape[0]:  # written by some replicas alone
            full.assign_add(1.0)

    for _ in range(2):
        strategy.run(fn, (rows(2, 1, 0),))
    assert np.asarray(seen.components).tolist() == [4, 2, 0]
    assert np.asarray(full.components).tolist() == [2, 2, 0]
    assert float(full.value) == 4.0


def test_state_that_all_replicas_change_alike(strategy):
    with strategy.scope():
        steps = keras.Variable(0, dtype="int32", trainable=False)
        total = keras.Variable(0.0, trainable=False, aggregation="sum")

    def fn(x):
        steps.assign_add(1)
        total.assign_add(jnp.sum(x[:, 0]))
        return steps.value

    assert lists(strategy.run(fn, (rows(2, 1, 0),))) == [1, 1, 1]
    assert int(steps.value) == 1
    assert float(total.value) == 6.0


def test_one_replica_may_be_empty():
    one = stratagem.OneDeviceStrategy("cpu:0")
    assert one.run(lambda x: x * 2, (np.zeros((0, 2), "float32"),)).shape == (0, 2)


# Errors.


def test_write_of_the_row_count(strategy):
    with strategy.scope():
        v = keras.Variable(0.0, name="row_count", trainable=False)
        w = keras.Variable(0.0, name="fine", trainable=False)

    def fn(x):
        v.assign(jnp.float32(x.shape[0]))
        w.assign(1.0)

    with pytest.raises(ReplicaDependentWriteError, match=r"1 variable\(s\):\n  'row_count'"):
        strategy.run(fn, (rows(2, 1, 0),))
    strategy.run(fn, (rows(1, 1, 1),))  # the same number everywhere: the same write everywhere
    assert float(v.value) == 1.0


def test_write_by_some_replicas_alone(strategy):
    with strategy.scope():
        v = keras.Variable(0.0, name="sometimes", trainable=False)

    def fn(x):
        if x.shape[0]:
            v.assign(5.0)

    with pytest.raises(ReplicaDependentWriteError, match="'sometimes'"):
        strategy.run(fn, (rows(2, 1, 0),))


def test_write_of_one_of_two_shared_values(strategy):
    """Both values are the same on all replicas; which one is written is not."""
    with strategy.scope():
        source = keras.Variable(1.0, trainable=False)
        v = keras.Variable(0.0, name="either", trainable=False)

    def fn(x):
        a, b = source.value * 2, source.value * 3
        v.assign(a if x.shape[0] > 1 else b)
        return a + b

    with pytest.raises(ReplicaDependentWriteError, match="'either'"):
        strategy.run(fn, (rows(2, 1, 1),))


def test_different_structures(strategy):
    def fn(x):
        return jnp.sum(x) if x.shape[0] else (jnp.sum(x), x)

    with pytest.raises(UnevenShapesError, match="returns the same structure.*class 0.*class 1"):
        strategy.run(fn, (rows(1, 1, 0),))


def test_different_ranks(strategy):
    with pytest.raises(
        UnevenShapesError, match="same structure, ranks and dtypes.*float32 of rank"
    ):
        strategy.run(lambda x: x if x.shape[0] else x[:, 0], (rows(1, 1, 0),))


def test_a_number_instead_of_a_tensor(strategy):
    with pytest.raises(UnevenShapesError, match=r"Return tensors, such as jnp.zeros\(\(\)\)"):
        strategy.run(lambda x: jnp.sum(x) if x.shape[0] else 0.0, (rows(1, 1, 0),))


def test_all_reduce_of_different_shapes(strategy):
    with pytest.raises(UnevenShapesError, match=r"reduce the same shapes.*sum over its rows first"):
        strategy.run(lambda x: here().all_reduce("SUM", x), (rows(2, 1, 0),))


def test_collectives_that_some_replicas_skip(strategy):
    def fn(x):
        total = jnp.sum(x)
        return here().all_reduce("SUM", total) if x.shape[0] else total

    with pytest.raises(UnevenShapesError, match="Expected all replicas to reduce the same shapes"):
        strategy.run(fn, (rows(1, 1, 0),))


@pytest.mark.parametrize("how", ["scan", "cond"])
def test_collectives_inside_loops(strategy, how):
    def body(c):
        return here().all_reduce("SUM", c)

    def fn(x):
        total = jnp.sum(x)
        if how == "scan":
            return jax.lax.scan(lambda c, _: (body(c), None), total, length=2)[0]
        return jax.lax.cond(jnp.float32(1) > 0, body, lambda c: c, total)

    with pytest.raises(UnevenShapesError, match=rf"at the top level of a step.*\['{how}'\]"):
        strategy.run(fn, (rows(2, 1, 0),))


def test_parts_of_different_ranks(strategy):
    parts = stratagem.PerReplica([np.ones(2), np.ones((1, 2)), np.ones(2)])
    with pytest.raises(UnevenShapesError, match=r"one rank and dtype.*replica 1: \(1, 2\)"):
        strategy.run(lambda x: x, (parts,))


def test_parts_of_different_dtypes(strategy):
    parts = stratagem.PerReplica([np.ones(2, "float32"), np.ones(2, "int32"), np.ones(2, "int32")])
    with pytest.raises(UnevenShapesError, match=r"one rank and dtype.*replica 1: \(2,\) int32"):
        strategy.run(lambda x: x, (parts,))
