"""Section 2.3: what reduce, gather and reduce_to do with each kind of value, axis and dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem
from conformance.table import COMPONENTS, SEVERAL, close, make, parts, plain, variable
from stratagem import IndexedSlices, Mirrored, PerReplica


@pytest.fixture(params=SEVERAL)
def strategy(request):
    return make(request.param)


@pytest.fixture
def two():
    return make("two")


def both_forms(strategy, values, dtype=np.float32):
    """The same PerReplica value as separate parts and as one array on the devices."""
    values = values[: strategy.num_replicas_in_sync]
    separate = PerReplica([np.asarray(v, dtype) for v in values])
    stacked = strategy.run(lambda x: x, (separate,))
    assert separate.stacked is None
    assert stacked.stacked is not None
    return separate, stacked


@pytest.mark.parametrize("op", ["SUM", "Mean", stratagem.ReduceOp.SUM])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), [0, -1], np.int64(1)])
def test_axes(strategy, op, axis):
    values = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    n = strategy.num_replicas_in_sync
    axes = () if axis is None else tuple(np.atleast_1d(axis))
    over = (0, *(a % 2 + 1 for a in axes))
    how = np.mean if str(op).upper() == "MEAN" else np.sum
    expected = how(values[:n], axis=over).tolist()
    for value in both_forms(strategy, values):
        assert close(plain(strategy.reduce(op, value, axis)), expected)


def test_structures(strategy):
    n = strategy.num_replicas_in_sync
    value = {"a": parts(strategy, [1, 2, 3]), "b": (parts(strategy, [[4], [5], [6]]), [])}
    result = strategy.reduce("SUM", value, axis=None)
    assert plain(result) == {"a": n * (n + 1) / 2, "b": [[n * (n + 7) / 2], []]}
    assert isinstance(result["b"], tuple)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int8", "uint8"])
@pytest.mark.parametrize("axis", [None, 0])
def test_dtypes(strategy, dtype, axis):
    """Sums and means of floats keep the dtype; means of integers are float32 (TF: float64)."""
    values = [[1, 2], [3, 4], [5, 6]]
    n = strategy.num_replicas_in_sync
    for value in both_forms(strategy, values, jnp.dtype(dtype)):
        total = strategy.reduce("SUM", value, axis)
        mean = strategy.reduce("MEAN", value, axis)
        assert total.dtype == dtype
        assert mean.dtype == (dtype if "float" in dtype else "float32")
        over = 0 if axis is None else (0, 1)
        assert np.allclose(np.asarray(total, np.float32), np.sum(values[:n], over))
        assert np.allclose(np.asarray(mean, np.float32), np.mean(values[:n], over))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_means_neither_overflow_nor_lose_count(two, dtype):
    big = np.full(1025, 4096, jnp.dtype(dtype))  # the sum, 8.4e6, is beyond float16
    separate, stacked = both_forms(two, [big, big], big.dtype)
    uneven = PerReplica([big, big[:1000]])
    for value in (separate, stacked, uneven):
        assert float(two.reduce("MEAN", value, axis=0)) == 4096
    traced = stratagem.function(lambda v: two.reduce("MEAN", two.run(lambda x: x, (v,)), axis=0))
    for value in (separate, uneven):
        result = traced(value)
        assert float(result) == 4096
        assert result.dtype == dtype


def test_values_that_all_replicas_share(strategy):
    n = strategy.num_replicas_in_sync
    var = variable(strategy, "none", value=[1.0, 3.0])
    for value in (Mirrored([np.array([1, 3], np.float32)] * n), np.array([1, 3], np.float32), var):
        assert plain(strategy.reduce("MEAN", value, axis=None)) == [1.0, 3.0]
        assert plain(strategy.reduce("MEAN", value, axis=0)) == 2.0
        assert plain(strategy.reduce("SUM", value, axis=0)) == 4.0 * n
        with pytest.raises(ValueError, match=r"Expected a PerReplica value to sum over"):
            strategy.reduce("SUM", value, axis=None)
    assert plain(strategy.reduce("SUM", np.zeros(2), axis=None)) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", COMPONENTS, indirect=True)
def test_the_components_of_an_on_read_variable(strategy):
    n = strategy.num_replicas_in_sync
    var = variable(strategy, "mean", "on_read")
    assert float(strategy.reduce("SUM", var, axis=None)) == 10.0 * n
    assert plain(strategy.gather(strategy.run(lambda: var.value[None]), 0)) == [10.0] * n


def test_indexed_slices_become_dense(two):
    slices = PerReplica(
        [IndexedSlices(np.full((2, 1), i, np.float32), np.array([0, i]), (3, 1)) for i in (1, 2)]
    )
    assert plain(two.reduce("SUM", slices, axis=None)) == [[3.0], [1.0], [2.0]]
    assert plain(two.reduce("MEAN", slices, axis=None)) == [[1.5], [0.5], [1.0]]
    assert plain(two.reduce("MEAN", slices.values[0], axis=None)) == [[1.0], [1.0], [0.0]]


def test_mean_of_slices_divides_their_values(two):
    def step(x):
        slices = IndexedSlices(x, np.array([1]), (3, 1))
        mean = stratagem.get_replica_context().all_reduce("MEAN", slices)
        return mean.indices, mean.values

    indices, values = two.run(step, (parts(two, [[[1]], [[2]]]),))
    assert plain(indices).values == [[1, 1]] * 2
    assert plain(values).values == [[[0.5], [1.0]]] * 2


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(strategy, axis):
    values = np.arange(18, dtype=np.int32).reshape(3, 2, 3)
    n = strategy.num_replicas_in_sync
    expected = np.concatenate(values[:n], axis).tolist()
    for value in both_forms(strategy, values, np.int32):
        gathered = strategy.gather({"a": value}, axis)["a"]
        assert plain(gathered) == expected
        assert gathered.dtype == np.int32


def test_gather_of_shared_values(strategy):
    n = strategy.num_replicas_in_sync
    plain_tensor = np.ones(2, np.float32)
    assert strategy.gather(plain_tensor, 0) is plain_tensor
    assert plain(strategy.gather(Mirrored([plain_tensor] * n), 0)) == [1.0] * 2 * n
    assert plain(strategy.gather(variable(strategy, "none", value=[5.0]), 0)) == [5.0] * n


def test_gather_of_empty_parts(two):
    value = PerReplica([np.zeros((0, 2), np.float32), np.ones((1, 2), np.float32)])
    assert plain(two.gather(value, 0)) == [[1.0, 1.0]]


class TestReduceTo:
    def test_a_variable_gets_a_mirrored_value(self, strategy):
        n = strategy.num_replicas_in_sync
        result = strategy.extended.reduce_to(
            "SUM", parts(strategy, [1, 2, 3]), destinations=variable(strategy, "none")
        )
        assert isinstance(result, Mirrored)
        assert [float(v) for v in result.values] == [n * (n + 1) / 2] * n
        on = [stratagem.config.device_name(v.device) for v in result.values]
        assert tuple(on) == strategy.worker_devices

    def test_a_device_gets_a_tensor(self, two):
        result = two.extended.reduce_to("MEAN", parts(two, [1, 2]), destinations="CPU:1")
        assert isinstance(result, jax.Array)
        assert float(result) == 1.5
        assert stratagem.config.device_name(result.device) == "/device:CPU:1"

    def test_several_devices_get_a_mirrored_value(self, two):
        value = parts(two, [1, 2])
        result = two.extended.reduce_to("SUM", value, destinations=["CPU:0", "CPU:3"])
        assert isinstance(result, Mirrored)
        assert [float(v) for v in result.values] == [3.0, 3.0]

    def test_structures(self, two):
        value = {"a": parts(two, [1, 2])}
        result = two.extended.reduce_to("SUM", value, destinations=parts(two, [0, 0]))
        assert plain(result) == {"a": 3.0}
        assert isinstance(result["a"], Mirrored)

    def test_one_replica_gets_a_tensor(self):
        one = make("one")
        result = one.extended.reduce_to("SUM", np.float32(2), destinations=variable(one, "none"))
        assert plain(result) == 2.0

    def test_batches(self, two):
        var = variable(two, "none")
        pairs = [(parts(two, [1, 2]), var), (parts(two, [3, 4]), "CPU:0")]
        first, second = two.extended.batch_reduce_to("SUM", pairs)
        assert isinstance(first, Mirrored)
        assert (plain(first), plain(second)) == (3.0, 7.0)

    def test_nowhere(self, two):
        with pytest.raises(ValueError, match="Expected destinations"):
            two.extended.reduce_to("SUM", parts(two, [1, 2]), destinations=None)
        with pytest.raises(ValueError, match=r"list of \(value, destinations\)"):
            two.extended.batch_reduce_to("SUM", [parts(two, [1, 2])])


def test_local_results(strategy):
    n = strategy.num_replicas_in_sync
    value = {"a": parts(strategy, [1, 2, 3]), "b": 7}
    results = strategy.experimental_local_results(value)
    assert [plain(r) for r in results] == [{"a": r + 1.0, "b": 7} for r in range(n)]
    assert strategy.experimental_local_results("text") == ("text",)
    assert len(strategy.experimental_local_results(Mirrored([np.ones(1)] * n))) == n


def test_local_results_of_variables(strategy):
    n = strategy.num_replicas_in_sync
    for synchronization in ("auto", "on_read"):
        var = variable(strategy, "sum", synchronization)
        assert [float(v) for v in strategy.experimental_local_results(var)] == [10.0] * n
    foreign = variable(make("one"), "sum")
    assert strategy.experimental_local_results(foreign) == (foreign,)
